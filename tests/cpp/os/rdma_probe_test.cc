// RDMA ports in trees that look like sysfs.
#include "os/sysfs.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <utility>

#include "support/check.h"

namespace bagua_net {
namespace {

namespace fs = std::filesystem;

class FakeSysfs {
 public:
  FakeSysfs() {
    std::string name = (fs::temp_directory_path() / "bagua-net-sysfs-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    root_ = name;
  }
  FakeSysfs(const FakeSysfs&) = delete;
  FakeSysfs& operator=(const FakeSysfs&) = delete;
  ~FakeSysfs() { fs::remove_all(root_); }
  std::string root() const { return root_.string(); }
  void add_port(const std::string& device, const std::string& port, const std::string& state,
                const std::string& link = "InfiniBand") const {
    const fs::path directory = root_ / "class" / "infiniband" / device / "ports" / port;
    fs::create_directories(directory);
    std::ofstream(directory / "state") << state << "\n";
    std::ofstream(directory / "link_layer") << link << "\n";
    std::ofstream(directory / "rate") << "400 Gb/sec (4X NDR)\n";
  }

 private:
  fs::path root_;
};

EnvironmentReader environment_of(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

TEST_CASE(a_host_without_rdma_is_asked_nothing) {
  const FakeSysfs sysfs;
  CHECK(rdma_ports(environment_of({}), sysfs.root()).empty());
  CHECK_EQ(rdma_question(environment_of({}), sysfs.root()), "");
}

TEST_CASE(only_active_ports_would_be_used) {
  const FakeSysfs sysfs;
  sysfs.add_port("mlx5_1", "1", "1: DOWN", "Ethernet");
  sysfs.add_port("mlx5_0", "1", "2: INIT");
  sysfs.add_port("mlx5_2", "1", "5: ACTIVE_DEFER");
  sysfs.add_port("mlx5_3", "1", "");
  CHECK_EQ(rdma_question(environment_of({}), sysfs.root()), "");
  sysfs.add_port("mlx5_0", "2", "4: ACTIVE");
  sysfs.add_port("irdma0", "1", "4: ACTIVE", "Ethernet");
  sysfs.add_port("efa_0", "1", "4: ACTIVE", "Unspecified");
  const std::vector<RdmaPort> ports = rdma_ports(environment_of({}), sysfs.root());
  CHECK_EQ(ports.size(), std::size_t{7});
  CHECK_EQ(unused_rdma(ports),
           "efa_0 (400 Gb/sec), irdma0 (RDMA over Ethernet, 400 Gb/sec), mlx5_0:2 (InfiniBand, 400 Gb/sec) are up");
  CHECK_EQ(ports[4].name, "mlx5_1");
  CHECK_EQ(ports[4].state, "DOWN");
  CHECK_EQ(ports[6].state, "unknown");
}

TEST_CASE(the_question_names_ports_and_both_answers) {
  const FakeSysfs sysfs;
  for (int device = 0; device < 6; ++device) sysfs.add_port("mlx5_" + std::to_string(device), "1", "4: ACTIVE");
  const std::string question = rdma_question(environment_of({}), sysfs.root());
  CHECK(question.rfind("mlx5_0 (InfiniBand, 400 Gb/sec), mlx5_1", 0) == 0);
  CHECK(question.find("and 2 more are up, and NCCL uses TCP through Bagua-Net: is that wanted?") != std::string::npos);
  CHECK(question.find("ENABLE_BAGUA_NET=0") != std::string::npos);
  CHECK(question.find("NCCL_IB_DISABLE=1") != std::string::npos);
  CHECK(question.find('\n') == std::string::npos);
}

TEST_CASE(whoever_has_chosen_a_network_is_asked_nothing) {
  const FakeSysfs sysfs;
  sysfs.add_port("mlx5_0", "1", "4: ACTIVE");
  const auto is_asked = [&](const std::string& name, const std::string& value) {
    return !rdma_question(environment_of({{name, value}}), sysfs.root()).empty();
  };
  CHECK(!is_asked("NCCL_IB_DISABLE", "1"));
  CHECK(is_asked("NCCL_IB_DISABLE", "0"));
  CHECK(is_asked("NCCL_IB_DISABLE", ""));
  CHECK(!is_asked("NCCL_NET", "Socket"));
  CHECK(!is_asked("NCCL_NET", "BaguaNet"));
  CHECK(is_asked("NCCL_NET", ""));
}

TEST_CASE(a_device_that_is_left_to_storage_is_not_asked_about) {
  const FakeSysfs sysfs;
  sysfs.add_port("mlx5_1", "1", "4: ACTIVE");
  sysfs.add_port("mlx5_10", "2", "4: ACTIVE");
  const auto unused = [&](const std::string& selected) {
    const std::string text = unused_rdma(rdma_ports(environment_of({{"NCCL_IB_HCA", selected}}), sysfs.root()));
    return std::make_pair(text.find("mlx5_1 ") != std::string::npos, text.find("mlx5_10:2") != std::string::npos);
  };
  CHECK(unused("") == std::make_pair(true, true));
  CHECK(unused("mlx5_1") == std::make_pair(true, true));
  CHECK(unused("=mlx5_1") == std::make_pair(true, false));
  CHECK(unused("^mlx5_1") == std::make_pair(false, false));
  CHECK(unused("^=mlx5_1") == std::make_pair(false, true));
  CHECK(unused("mlx5_10:1,mlx5_0") == std::make_pair(false, false));
  CHECK(unused("=mlx5_10:2,mlx5_1:1") == std::make_pair(true, true));
}

}  // namespace
}  // namespace bagua_net
