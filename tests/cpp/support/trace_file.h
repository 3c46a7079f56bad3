// A trace file as its readers see it, one event a line, with the few questions that the tests ask. That it is valid
// JSON is checked in Python (tests/net/test_trace.py).
#pragma once

#include <dirent.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace trace_file {

// The text behind `key` up to the next comma or brace; a JSON string without its quotes. "": no such key.
inline std::string value(const std::string& event, const std::string& key) {
  const std::string wanted = '"' + key + "\":";
  const std::size_t at = event.find(wanted);
  if (at == std::string::npos) return "";
  const std::size_t begin = at + wanted.size();
  if (event[begin] == '"') return event.substr(begin + 1, event.find('"', begin + 1) - begin - 1);
  return event.substr(begin, event.find_first_of(",}", begin) - begin);
}

inline long long number(const std::string& event, const std::string& key) {
  const std::string text = value(event, key);
  if (text.empty()) throw std::runtime_error("no " + key + " in " + event);
  return std::strtoll(text.c_str(), nullptr, 10);
}

inline std::string content(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// All events in the files of a folder.
class Trace {
 public:
  explicit Trace(const std::string& folder) {
    DIR* const entries = opendir(folder.c_str());
    if (entries == nullptr) throw std::runtime_error("cannot list " + folder);
    while (const dirent* entry = readdir(entries)) {
      if (entry->d_name[0] == '.') continue;
      paths_.push_back(folder + "/" + entry->d_name);
      std::ifstream file(paths_.back());
      for (std::string line; std::getline(file, line);) {
        if (line.front() == '{') events_.push_back(line);
      }
    }
    closedir(entries);
  }

  const std::vector<std::string>& paths() const { return paths_; }
  std::vector<std::string> named(const std::string& name) const {
    std::vector<std::string> found;
    for (const std::string& event : events_) {
      if (value(event, "name") == name && value(event, "ph") != "M") found.push_back(event);
    }
    return found;
  }
  std::string only(const std::string& name) const {
    const std::vector<std::string> found = named(name);
    if (found.size() != 1) throw std::runtime_error(std::to_string(found.size()) + " events are named " + name);
    return found.front();
  }
  // The name of the track that the event is on.
  std::string track_of(const std::string& event) const {
    for (const std::string& other : events_) {
      if (value(other, "name") != "thread_name" || value(other, "tid") != value(event, "tid")) continue;
      return value(other.substr(other.find("\"args\"")), "name");
    }
    return "";
  }

 private:
  std::vector<std::string> paths_;
  std::vector<std::string> events_;
};

}  // namespace trace_file
