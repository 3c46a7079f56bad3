#include "bench/resource_meter.h"

#include <sys/resource.h>
#include <time.h>

namespace bagua_net::bench {
namespace {

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

}  // namespace

double monotonic_seconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

ResourceUsage ResourceUsage::now() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return {seconds_of(usage.ru_utime), seconds_of(usage.ru_stime), usage.ru_nvcsw, usage.ru_nivcsw};
}

ResourceUsage ResourceUsage::since(const ResourceUsage& start) const {
  return {user_s - start.user_s, system_s - start.system_s, voluntary_switches - start.voluntary_switches,
          involuntary_switches - start.involuntary_switches};
}

void ResourceUsage::add_to(JsonLine* line) const {
  line->add("cpu_user_s", user_s)
      .add("cpu_system_s", system_s)
      .add("voluntary_switches", voluntary_switches)
      .add("involuntary_switches", involuntary_switches);
}

}  // namespace bagua_net::bench
