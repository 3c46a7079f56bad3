// The statistics page as another process sees it: through /proc, whatever is missing or full.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/owned_fd.h"
#include "stats/comm_stats.h"
#include "support/check.h"

namespace bagua_net {
namespace {

// The descriptors of this process that are pages, opened as a reader does.
std::vector<std::string> page_paths() {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry.path(), gone) == "/memfd:bagua-net-stats (deleted)") {
      found.push_back(entry.path());
    }
  }
  return found;
}

class Reader {
 public:
  explicit Reader(int flags = O_RDONLY) {
    CHECK_EQ(page_paths().size(), std::size_t{1});
    file_ = OwnedFd(::open(page_paths()[0].c_str(), flags | O_CLOEXEC));
  }
  int fd() const { return file_.get(); }

  template <typename Part>
  std::unique_ptr<Part> read(std::size_t offset) const {
    auto part = std::make_unique<Part>();
    CHECK_EQ(::pread(file_.get(), static_cast<void*>(part.get()), sizeof(Part), static_cast<off_t>(offset)),
             static_cast<ssize_t>(sizeof(Part)));
    return part;
  }
  std::unique_ptr<PageHeader> header() const { return read<PageHeader>(0); }
  std::unique_ptr<CommSlot> comm(std::size_t slot) const {
    return read<CommSlot>(kCommsOffset + slot * sizeof(CommSlot));
  }
  std::unique_ptr<StreamSlot> stream(std::size_t slot) const {
    return read<StreamSlot>(kStreamsOffset + slot * sizeof(StreamSlot));
  }

 private:
  OwnedFd file_;
};

SocketAddress ipv4(std::uint8_t last) { return {AF_INET, {10, 0, 0, last}, 0, 0}; }

// eth0 has 10.0.0.1 and 25 Gb/s, eth1 has 10.0.0.2 and an unknown speed.
std::shared_ptr<StatsPage> make_page(bool shared = true) {
  NetworkInterface fast;
  fast.name = "eth0";
  fast.address = ipv4(1);
  fast.speed_mbps = 25000;
  NetworkInterface other;
  other.name = "eth1";
  other.address = ipv4(2);
  return std::make_shared<StatsPage>(shared, JobPosition{3, 1, 8}, "node1", 4, std::vector{fast, other});
}

const StatsPage::CommNames kNames{CommDirection::kSend, false, "eth0", "10.0.0.2:4711 (host node2, process 4242)"};

}  // namespace

TEST_CASE(another_process_reads_what_was_counted) {
  const auto page = make_page();
  CHECK(page->is_shared());
  CommStats comm(page, kNames);
  StreamStats stream = comm.open_stream(5);
  comm.add_sent(100, false);
  comm.add_sent(5000, true);
  comm.posted(2, bagua_net::CommTrace::MessagePath::kInline);
  stream->bytes.add(5116);
  const Reader reader;
  const auto header = reader.header();
  CHECK_EQ(std::memcmp(header->magic, kPageMagic, sizeof kPageMagic), 0);
  CHECK_EQ(header->version, kPageVersion);
  CHECK_EQ(header->pid, std::int64_t{::getpid()});
  CHECK_EQ(header->rank, 3);
  CHECK_EQ(std::string(header->host), std::string("node1"));
  CHECK_EQ(header->generation.get() % 2, std::uint64_t{0});
  const auto seen = reader.comm(0);
  CHECK_EQ(std::string(seen->peer), kNames.peer);
  CHECK_EQ(seen->counters.inline_messages.get(), std::uint64_t{1});
  CHECK_EQ(seen->counters.inline_bytes.get(), std::uint64_t{100});
  CHECK_EQ(seen->counters.striped_bytes.get(), std::uint64_t{5000});
  CHECK_EQ(seen->counters.message_sizes[0].get(), std::uint64_t{1});
  CHECK_EQ(seen->counters.message_sizes[3].get(), std::uint64_t{1});
  CHECK(seen->posted_ms[2].load() != 0);
  comm.finished(2, 1);
  CHECK_EQ(reader.comm(0)->posted_ms[2].load(), 0u);
  const auto seen_stream = reader.stream(0);
  CHECK_EQ(seen_stream->index.load(), 5u);
  CHECK_EQ(seen_stream->counters.bytes.get(), std::uint64_t{5116});
}

TEST_CASE(every_size_has_its_class) {
  const auto page = make_page(false);
  struct Expected {
    std::size_t bytes;
    std::size_t size_class;
  };
  for (const Expected one : {Expected{0, 0},
                             {256, 0},
                             {257, 1},
                             {1024, 1},
                             {1025, 2},
                             {65536, 4},
                             {1u << 20, 6},
                             {4u << 20, 7},
                             {(4u << 20) + 1, 8},
                             {1u << 30, 8}}) {
    CommStats comm(page, kNames);
    comm.add_received(one.bytes);
    CHECK_EQ(comm->message_sizes[one.size_class].get(), std::uint64_t{1});
  }
}

TEST_CASE(nobody_can_cut_the_page_off_or_write_into_it) {
  const auto page = make_page();
  const Reader reader(O_RDWR);
  CHECK(::ftruncate(reader.fd(), 0) != 0);
  CHECK_EQ(errno, EPERM);
  CHECK(::ftruncate(reader.fd(), static_cast<off_t>(2 * kPageBytes)) != 0);
  const char byte = 1;
  const bool written = ::pwrite(reader.fd(), &byte, 1, 0) == 1;
  CHECK(!written || ::fcntl(reader.fd(), F_GET_SEALS) == (F_SEAL_SHRINK | F_SEAL_GROW));  // before Linux 5.1
}

TEST_CASE(slots_that_were_never_used_take_no_memory) {
  const auto page = make_page();
  const CommStats comm(page, kNames);
  struct stat state{};
  CHECK_EQ(::fstat(Reader().fd(), &state), 0);
  CHECK(state.st_blocks * 512 <= 4 * 4096);
}

// A name that the kernel refuses stands for all that it may refuse: descriptors, memory, the system call itself. (The
// sanitizers need descriptors of their own.)
TEST_CASE(without_a_file_there_is_memory_and_a_reason) {
  const SharedMemory memory(std::string(300, 'x'), 4096, true);
  CHECK(!memory.is_shared());
  CHECK(memory.failure().find("memfd_create") != std::string::npos);
  CHECK(memory.data() != nullptr);
  CHECK_EQ(static_cast<const char*>(memory.data())[4095], '\0');
}

TEST_CASE(without_a_page_everything_counts) {
  const auto page = make_page(false);
  CommStats comm(page, kNames);
  comm.add_sent(10, false);
  comm.open_stream(0)->bytes.add(10);
  CHECK_EQ(comm->inline_bytes.get(), std::uint64_t{10});
}

TEST_CASE(switched_off_there_is_no_file) {
  const auto page = make_page(false);
  CHECK(!page->is_shared() && page->failure().empty());
  CHECK(page_paths().empty());
}

TEST_CASE(closed_comms_leave_their_totals_and_their_slots) {
  const auto page = make_page();
  const Reader reader;
  for (int round = 0; round < 3; ++round) {
    CommStats comm(page, kNames);
    const StreamStats stream = comm.open_stream(0);
    comm.add_sent(100, false);
    stream->retransmits.set(2);
    CHECK_EQ(reader.comm(0)->counters.inline_bytes.get(), std::uint64_t{100});  // the slot began with zeros
  }
  const auto header = reader.header();
  CHECK_EQ(header->comms_used.load(), 1u);
  CHECK_EQ(header->streams_used.load(), 1u);
  CHECK_EQ(header->comms_opened.get(), std::uint64_t{3});
  CHECK_EQ(header->closed_comms.inline_bytes.get(), std::uint64_t{300});
  CHECK_EQ(header->closed_streams.retransmits.get(), std::uint64_t{6});
  CHECK_EQ(reader.comm(0)->state.load(), static_cast<std::uint32_t>(CommState::kFree));
}

TEST_CASE(a_nic_keeps_what_its_streams_have_moved) {
  const auto page = make_page();
  const Reader reader;
  CHECK_EQ(std::string(reader.header()->nics[0].name), std::string("eth0"));
  CHECK_EQ(reader.header()->nics[0].speed_mbps.load(), 25000u);
  {
    CommStats comm(page, kNames);
    StreamStats lost = comm.open_stream(0, ipv4(1));
    lost->bytes.add(100);
    CHECK_EQ(reader.stream(0)->nic.load(), 1u);
    lost.end(SlotState::kLost, "reset");
    lost.count_loss();
    const StreamStats next = comm.open_stream(0, ipv4(2));
    next->bytes.add(30);
    const auto stream = reader.stream(0);
    CHECK_EQ(stream->nic.load(), 2u);
    CHECK_EQ(stream->counters.bytes.get(), std::uint64_t{130});
    CHECK_EQ(stream->bytes_over_other_nics.get(), std::uint64_t{100});
    CHECK_EQ(reader.header()->nics[0].closed_sent_bytes.get(), std::uint64_t{100});
    CHECK_EQ(reader.header()->nics[0].streams_lost.load(), 1u);
    // Replaced over the same one.
    const StreamStats again = comm.open_stream(0, ipv4(2));
    again->bytes.add(2);
    CHECK_EQ(reader.header()->nics[1].closed_sent_bytes.get(), std::uint64_t{0});
  }
  CHECK_EQ(reader.header()->nics[0].closed_sent_bytes.get(), std::uint64_t{100});
  CHECK_EQ(reader.header()->nics[1].closed_sent_bytes.get(), std::uint64_t{32});
  CHECK_EQ(reader.header()->nics[1].closed_received_bytes.get(), std::uint64_t{0});
  CHECK_EQ(reader.header()->nics[1].streams_lost.load(), 0u);
}

TEST_CASE(streams_within_a_host_and_over_other_addresses_have_no_nic) {
  const auto page = make_page();
  const Reader reader;
  CommStats within(page, {CommDirection::kReceive, true, "eth0", "10.0.0.1:4711 (process 4242)"});
  const StreamStats inside = within.open_stream(0, ipv4(1));
  CommStats between(page, kNames);
  const StreamStats elsewhere = between.open_stream(0, ipv4(3));
  CHECK_EQ(reader.stream(0)->nic.load(), 0u);
  CHECK_EQ(reader.stream(1)->nic.load(), 0u);
}

TEST_CASE(the_states_of_nics_are_shown_and_their_losses_counted) {
  const auto page = make_page();
  const Reader reader;
  CHECK_EQ(reader.header()->nics[1].state.load(), 0u);  // nothing watches it
  CHECK(!page->set_link_state("eth1", LinkState::kUsable));
  CHECK_EQ(reader.header()->nics[1].state.load(), static_cast<std::uint32_t>(LinkState::kUsable));
  CHECK(!page->set_link_state("docker0", LinkState::kDown));
  CHECK_EQ(reader.header()->nics[1].since_ms.get(), std::uint64_t{0});
  CHECK(page->set_link_state("eth1", LinkState::kNoCarrier));
  CHECK(page->set_link_state("eth1", LinkState::kAbsent));
  CHECK_EQ(reader.header()->nics[1].state.load(), static_cast<std::uint32_t>(LinkState::kAbsent));
  CHECK(reader.header()->nics[1].since_ms.get() > 0);
  CHECK(page->set_link_state("eth1", LinkState::kUsable));
  CHECK_EQ(reader.header()->nics[1].downs.load(), 1u);
  CHECK_EQ(reader.header()->nics[0].downs.load(), 0u);
}

TEST_CASE(comms_beyond_the_last_slot_are_counted_when_they_close) {
  const auto page = make_page();
  const Reader reader;
  std::vector<CommStats> comms;
  comms.reserve(kCommSlots + 2);
  for (std::size_t i = 0; i < kCommSlots + 2; ++i) comms.emplace_back(page, kNames);
  CHECK_EQ(reader.header()->comms_hidden.get(), std::uint64_t{2});
  comms.back().add_sent(7, true);
  const StreamStats hidden = comms.back().open_stream(0, ipv4(1));
  hidden->chunks.add(1);
  hidden->bytes.add(9);
  comms.pop_back();
  CHECK_EQ(reader.header()->comms_hidden.get(), std::uint64_t{1});
  CHECK_EQ(reader.header()->closed_comms.striped_bytes.get(), std::uint64_t{7});
  CHECK_EQ(reader.header()->closed_streams.chunks.get(), std::uint64_t{1});
  CHECK_EQ(reader.header()->nics[0].closed_sent_bytes.get(), std::uint64_t{9});
}

TEST_CASE(a_failure_is_kept_after_its_comm) {
  const auto page = make_page();
  const Reader reader;
  {
    CommStats comm(page, kNames);
    comm.fail("connection to 10.0.0.2:4711: " + std::string(1000, 'x'));
    CHECK_EQ(reader.comm(0)->state.load(), static_cast<std::uint32_t>(CommState::kFailed));
  }
  const auto header = reader.header();
  CHECK_EQ(header->comms_failed.get(), std::uint64_t{1});
  CHECK_EQ(std::string(header->last_failure).substr(0, 27), std::string("connection to 10.0.0.2:4711"));
  CHECK_EQ(std::string(header->last_failure).size(), sizeof(PageHeader::last_failure) - 1);
}

TEST_CASE(a_forked_child_has_a_page_of_its_own) {
  const auto page = make_page();
  CommStats comm(page, kNames);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto own = make_page();
    const bool apart = page_paths().size() == 2 && own->is_shared();
    CommStats(own, kNames).add_sent(1, false);
    ::_exit(apart ? 0 : 1);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK_EQ(Reader().header()->pid, std::int64_t{::getpid()});
  CHECK_EQ(Reader().header()->comms_opened.get(), std::uint64_t{1});
}

// What readers rely on: with an even generation that stays the same, the page is whole.
TEST_CASE(a_reader_never_takes_a_half_changed_page_for_whole) {
  const auto page = make_page();
  const Reader reader;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    while (!stop.load()) {
      CommStats comm(page, kNames);
      comm.add_sent(1, false);
    }
  });
  int whole = 0;
  while (whole < 200) {
    const auto before = reader.header();
    const auto comm = reader.comm(0);
    const std::uint64_t after = reader.header()->generation.get();
    if (before->generation.get() != after || after % 2 != 0) continue;
    ++whole;
    // Every comm that was opened is open, or closed; those that are closed sent one byte each.
    const bool open = comm->state.load() != static_cast<std::uint32_t>(CommState::kFree);
    CHECK_EQ(before->comms_opened.get(), before->closed_comms.inline_bytes.get() + (open ? 1 : 0));
  }
  stop.store(true);
  writer.join();
}

// What the kernel does beyond the limit ends a process, unless it ignores the signal as Python does.
TEST_CASE(a_limit_of_file_sizes_is_named_and_ends_no_process) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit small{4096, 4096};
    if (::setrlimit(RLIMIT_FSIZE, &small) != 0) ::_exit(1);
    const SharedMemory memory("test", 8192, true);
    ::_exit(memory.failure().find("ulimit -f") == std::string::npos || memory.data() == nullptr ? 2 : 0);
  }
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

}  // namespace bagua_net
