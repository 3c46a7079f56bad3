// rdma_probe over trees that look like sysfs.
#include "os/sysfs.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

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
  void add_port(const std::string& device, const std::string& port, const std::string& state) const {
    const fs::path directory = root_ / "class" / "infiniband" / device / "ports" / port;
    fs::create_directories(directory);
    std::ofstream(directory / "state") << state << "\n";
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

TEST_CASE(no_infiniband_class_means_no_port) {
  const FakeSysfs sysfs;
  CHECK(active_rdma_ports(sysfs.root()).empty());
  CHECK_EQ(rdma_replaced_warning(environment_of({}), sysfs.root()), "");
}

TEST_CASE(only_active_ports_count) {
  const FakeSysfs sysfs;
  sysfs.add_port("mlx5_1", "1", "1: DOWN");
  sysfs.add_port("mlx5_0", "2", "4: ACTIVE");
  sysfs.add_port("mlx5_0", "1", "2: INIT");
  sysfs.add_port("irdma0", "1", "4: ACTIVE");
  sysfs.add_port("mlx5_2", "1", "5: ACTIVE_DEFER");
  sysfs.add_port("mlx5_3", "1", "");
  const std::vector<std::string> ports = active_rdma_ports(sysfs.root());
  CHECK_EQ(ports.size(), std::size_t{2});
  CHECK_EQ(ports[0], "irdma0 port 1");
  CHECK_EQ(ports[1], "mlx5_0 port 2");
}

TEST_CASE(warns_with_names_and_remedies) {
  const FakeSysfs sysfs;
  for (int device = 0; device < 6; ++device) sysfs.add_port("mlx5_" + std::to_string(device), "1", "4: ACTIVE");
  const std::string warning = rdma_replaced_warning(environment_of({}), sysfs.root());
  CHECK(warning.find("mlx5_0 port 1, mlx5_1 port 1, mlx5_2 port 1, mlx5_3 port 1 and 2 more") != std::string::npos);
  CHECK(warning.find("ENABLE_BAGUA_NET=0") != std::string::npos);
  CHECK(warning.find("NCCL_IB_DISABLE=1") != std::string::npos);
}

TEST_CASE(nothing_is_replaced_where_nccl_would_not_use_it) {
  const FakeSysfs sysfs;
  sysfs.add_port("mlx5_0", "1", "4: ACTIVE");
  CHECK_EQ(rdma_replaced_warning(environment_of({{"NCCL_IB_DISABLE", "1"}}), sysfs.root()), "");
  CHECK(!rdma_replaced_warning(environment_of({{"NCCL_IB_DISABLE", "0"}}), sysfs.root()).empty());
  CHECK(!rdma_replaced_warning(environment_of({{"NCCL_IB_DISABLE", ""}}), sysfs.root()).empty());
}

}  // namespace
}  // namespace bagua_net
