// DeviceList: the devices, by the numbers under which NCCL knows them. First come those that the plugin made; then
// those that NCCL has joined of them (makeVDevice), because NCCL_NET_FORCE_MERGE or NCCL_NET_MERGE_LEVEL says so.
//
// Any thread. A device stays as it is, and its number remains its own.
#pragma once

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "transport/device.h"

namespace bagua_net {

class DeviceList {
 public:
  using Joins = std::vector<std::vector<int>>;  // the numbers of which each device was joined

  explicit DeviceList(std::vector<Device> made);

  int count() const;
  // nullptr: there is none of this number.
  std::shared_ptr<const Device> at(int number) const;

  // NCCL wants one device in place of these; *number is the first of the new ones. Devices of several rails become one
  // for each rail, so that rails stay apart and channels stay as many. A single one is repeated, which NCCL up to 2.26
  // asks for. An error says why they cannot be joined.
  Status join(const std::vector<int>& numbers, int* number);

  // What was joined, for the list of the next transport. NCCL either goes on using the old numbers there, or counts the
  // devices again and joins the same ones again. So `restore` makes them known without counting them.
  Joins joins() const;
  void restore(const Joins& joins);

 private:
  Status make_joined(const std::vector<int>& numbers, std::vector<Device>* joined) const REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::vector<std::shared_ptr<const Device>> devices_ GUARDED_BY(mutex_);
  const std::size_t made_;                  // the first that NCCL joined, if there is one
  std::size_t counted_ GUARDED_BY(mutex_);  // those behind were restored
};

}  // namespace bagua_net
