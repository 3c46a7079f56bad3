#include "trace/trace_path.h"

#include <cctype>

namespace bagua_net {
namespace {

// Host names come from the kernel, and become part of a file name.
std::string file_name_part(const std::string& text) {
  std::string part;
  for (const char letter : text) {
    const bool is_plain =
        std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '-' || letter == '_' || letter == '.';
    part += is_plain ? letter : '_';
  }
  return part;
}

}  // namespace

std::string trace_path(const std::string& pattern, const TraceIdentity& identity) {
  const std::string rank = identity.rank < 0 ? "none" : std::to_string(identity.rank);
  const std::string host = file_name_part(identity.host);
  const std::string process = std::to_string(identity.process_id);
  std::string path;
  bool has_process = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char next = pattern[i] == '%' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (next == '\0' || std::string("rhp%").find(next) == std::string::npos) {
      path += pattern[i];
      continue;
    }
    ++i;
    switch (next) {
      case 'r': path += rank; break;
      case 'h': path += host; break;
      case 'p':
        path += process;
        has_process = true;
        break;
      default: path += '%'; break;
    }
  }
  if (has_process) return path;
  const std::string own = (identity.rank < 0 ? "." : ".rank" + rank + ".") + host + "." + process;
  const std::size_t slash = path.rfind('/');
  const std::size_t name = slash == std::string::npos ? 0 : slash + 1;
  const std::size_t dot = path.rfind('.');
  const bool has_extension = dot != std::string::npos && dot > name;
  return path.insert(has_extension ? dot : path.size(), own);
}

}  // namespace bagua_net
