// TemporaryTree: a directory that a test fills with the files of a made-up sysfs, procfs or cgroupfs; removed with it.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

class TemporaryTree {
 public:
  TemporaryTree() {
    std::string pattern = (std::filesystem::temp_directory_path() / "bagua-net-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp " + pattern + " failed");
    // Real paths are compared with it, and the temporary directory may be a link.
    root_ = std::filesystem::canonical(pattern);
  }
  ~TemporaryTree() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  TemporaryTree(const TemporaryTree&) = delete;
  TemporaryTree& operator=(const TemporaryTree&) = delete;

  std::string root() const { return root_.string(); }

  void write(const std::string& path, const std::string& text) const {
    const auto file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void make_directory(const std::string& path) const { std::filesystem::create_directories(root_ / path); }
  // `target` relative to the root.
  void link(const std::string& path, const std::string& target) const {
    const auto file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::filesystem::create_directory_symlink(root_ / target, file);
  }

 private:
  std::filesystem::path root_;
};
