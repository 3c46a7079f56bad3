// Where the streams of a comm go when the path of some is lost and returns. That they leave it, and are back in the
// end: send_paths_model_test.cc.
#include "transport/comm/send_paths.h"

#include <string>
#include <vector>

#include "support/check.h"

namespace bagua_net {
namespace {

constexpr std::uint64_t kAll = 0b1111;  // places

template <Prepared kHowFar>
Prepared prepared(std::size_t /*place*/, std::size_t /*path*/) {
  return kHowFar;
}

struct KnownPaths {
  explicit KnownPaths(std::size_t count) : paths(count) {
    for (std::size_t path = 0; path < count; ++path) paths[path].interface.name = "nic" + std::to_string(path);
  }
  std::vector<NicPath> paths;
  PathStates states;
};
struct Places : private KnownPaths, PlacePaths {
  Places(const std::vector<std::size_t>& first, const std::vector<std::size_t>& own, std::size_t count)
      : KnownPaths(count), PlacePaths(first, own, paths, &states) {}

  // The next connections are ready at once.
  std::uint64_t places_to_move(std::uint64_t live, const Probe& probe, std::int64_t now_ms) {
    return PlacePaths::places_to_move(live, probe, prepared<Prepared::kReady>, now_ms).leave;
  }
  void set_link(std::size_t path, bool is_usable) { states.set_link(paths[path].interface, is_usable); }
};

Places two_paths() { return {{0, 1, 0, 1}, {0, 1, 0, 1}, 2}; }

bool works(std::size_t /*path*/) { return true; }
bool fails(std::size_t /*path*/) { return false; }

}  // namespace

TEST_CASE(one_path_is_never_left) {
  Places paths({0, 0}, {0, 0}, 1);
  paths.on_lost(1, false, 0);
  CHECK_EQ(paths.replacement_path(1, 0b01), std::size_t{0});
  CHECK_EQ(paths.places_to_move(0b11, works, 100000), std::uint64_t{0});
  CHECK(!Places({}, {}, 0).has_choice());
  CHECK_EQ(Places({}, {}, 0).replacement_path(0, 0), std::size_t{0});
}

TEST_CASE(without_any_other_stream_the_next_path_is_tried) {
  Places paths({0, 1, 2}, {0, 1, 2}, 3);
  CHECK_EQ(paths.replacement_path(2, 0), std::size_t{0});
  CHECK_EQ(paths.replacement_path(0, 0), std::size_t{1});
}

TEST_CASE(a_replacement_takes_the_place_whose_path_it_has) {
  Places paths = two_paths();
  CHECK_EQ(paths.place_for(1, 0b0110), std::size_t{1});
  CHECK_EQ(paths.place_for(0, 0b0110), std::size_t{2});
  CHECK_EQ(paths.place_for(0, 0b1010), std::size_t{1});
}

TEST_CASE(a_path_that_loses_what_returned_is_tried_less_often) {
  Places paths = two_paths();
  std::int64_t now_ms = 1000000;
  std::int64_t last_pause_ms = 0;
  paths.on_lost(1, false, now_ms);
  paths.on_joined(1, 0, false, now_ms);
  for (int cut = 0; cut < 8; ++cut) {
    const std::int64_t lost_ms = now_ms;
    while (paths.places_to_move(kAll, works, now_ms) == 0) now_ms += 1000;
    const std::int64_t pause_ms = now_ms - lost_ms;
    CHECK(pause_ms >= last_pause_ms && pause_ms <= 60000);
    last_pause_ms = pause_ms;
    paths.on_lost(1, false, now_ms);
    paths.on_joined(1, 1, false, now_ms);
    now_ms += 1000;  // and at once it is lost again
    paths.on_lost(1, false, now_ms);
    paths.on_joined(1, 0, false, now_ms);
  }
  CHECK_EQ(last_pause_ms, std::int64_t{60000});
}

TEST_CASE(a_cable_that_is_pulled_every_five_seconds_is_used_each_time) {
  Places paths = two_paths();
  for (std::int64_t now_ms = 1000000; now_ms < 1100000; now_ms += 6000) {
    paths.on_lost(1, false, now_ms);
    paths.on_joined(1, 0, false, now_ms);
    CHECK_EQ(paths.places_to_move(kAll, works, now_ms + 1000), std::uint64_t{0b10});
    paths.on_lost(1, false, now_ms + 1000);
    paths.on_joined(1, 1, false, now_ms + 1000);
  }
}

TEST_CASE(a_path_that_the_kernel_announces_as_lost_is_used_whenever_it_returns) {
  Places paths = two_paths();
  std::int64_t now_ms = 1000000;
  for (int cut = 0; cut < 20; ++cut, now_ms += 1000) {
    paths.on_lost(1, true, now_ms);
    CHECK_EQ(paths.replacement_path(1, 0b0101), std::size_t{0});
    paths.on_joined(1, 0, false, now_ms);
    CHECK_EQ(paths.places_to_move(kAll, works, now_ms), std::uint64_t{0b10});
    paths.on_lost(1, false, now_ms);
    paths.on_joined(1, 1, false, now_ms);
  }
  // Also if that happens on the way back.
  paths.on_lost(1, true, now_ms);
  paths.on_joined(1, 0, false, now_ms);
  CHECK_EQ(paths.places_to_move(kAll, works, now_ms), std::uint64_t{0b10});
  paths.on_lost(1, true, now_ms);
  CHECK_EQ(paths.replacement_path(1, 0b0101), std::size_t{1});
}

TEST_CASE(small_messages_move_to_the_path_that_turned_out_nearest) {
  Places paths({0, 0, 1}, {1, 0, 1}, 2);
  CHECK_EQ(paths.places_to_move(0b111, works, 1000), std::uint64_t{0b001});
  CHECK_EQ(paths.replacement_path(0, 0b110), std::size_t{1});
}

TEST_CASE(streams_whose_path_could_not_connect_at_the_start_move_there_once_it_works) {
  Places paths({0, 0, 0, 0}, {0, 1, 0, 1}, 2);
  CHECK_EQ(paths.path_of(1), std::size_t{0});
  CHECK_EQ(paths.places_to_move(kAll, fails, 100000), std::uint64_t{0});
  CHECK_EQ(paths.places_to_move(kAll, works, 101000), std::uint64_t{0b1010});
  for (const std::size_t place : {1, 3}) {
    paths.on_lost(place, false, 101000);
    CHECK_EQ(paths.replacement_path(place, 0b0101), std::size_t{1});
    paths.on_joined(place, 1, false, 101000);
  }
  CHECK_EQ(paths.places_to_move(kAll, works, 200000), std::uint64_t{0});
}

TEST_CASE(streams_stay_until_the_next_connections_of_all_over_their_path_are_ready) {
  Places paths({0, 0, 0, 0}, {0, 1, 0, 1}, 2);
  const auto one_waits = [](std::size_t place, std::size_t path) {
    CHECK_EQ(path, std::size_t{1});
    return place == 1 ? Prepared::kReady : Prepared::kWaiting;
  };
  CHECK_EQ(paths.PlacePaths::places_to_move(kAll, works, one_waits, 1000).leave, std::uint64_t{0});
  CHECK_EQ(paths.moving(), std::uint64_t{0});
  CHECK_EQ(paths.replacement_path(1, 0b1101), std::size_t{1});  // if it is lost now: the next one
  CHECK_EQ(paths.places_to_move(kAll, works, 2000), std::uint64_t{0b1010});
  // Also while the path is not known to work, they leave as long as the connections are there.
  CHECK_EQ(paths.PlacePaths::places_to_move(kAll, fails, prepared<Prepared::kReady>, 3000).stay, std::uint64_t{0});
  CHECK_EQ(paths.PlacePaths::places_to_move(kAll, fails, one_waits, 4000).stay, std::uint64_t{0b1000});
  CHECK_EQ(paths.moving(), std::uint64_t{0b0010});
}

TEST_CASE(a_path_over_which_no_connection_can_be_prepared_is_tried_less_often) {
  Places paths({0, 0, 0}, {0, 1, 1}, 2);
  int tries = 0;
  const auto refused = [&](std::size_t /*place*/, std::size_t /*path*/) {
    ++tries;
    return Prepared::kFailed;
  };
  for (std::int64_t now_ms = 1000000; now_ms < 1600000; now_ms += 1000) {
    CHECK_EQ(paths.PlacePaths::places_to_move(0b111, works, refused, now_ms).leave, std::uint64_t{0});
  }
  CHECK(tries > 2 * 10 && tries < 2 * 20);
}

TEST_CASE(a_path_that_fails_in_the_pause_after_a_refusal_is_found_out) {
  struct Unanswered final : PathProbe {
    State look() override { return State::kConnecting; }
    std::size_t packet_bytes() const override { return 0; }
  };
  const std::vector<NicPath> known = KnownPaths(2).paths;
  PathStates states(0, [](const NicPath&) { return std::make_unique<Unanswered>(); });
  PlacePaths paths({0, 0}, {0, 1}, known, &states);
  std::int64_t now_ms = 1000000;
  for (const NicPath& path : known) states.on_connected(path, 0, now_ms);
  int refused = 0;
  const auto refuse = [&](std::size_t /*place*/, std::size_t /*path*/) { return ++refused, Prepared::kFailed; };
  while (refused < 3) {
    paths.places_to_move(0b11, works, refuse, now_ms);
    now_ms += 1000;
  }
  CHECK_EQ(states.usable(known, now_ms).size(), std::size_t{2});
  const auto probe = [&](std::size_t path) { return states.works(known[path], now_ms); };
  for (const std::int64_t end_ms = now_ms + 3000; now_ms < end_ms; now_ms += 200) {
    paths.places_to_move(0b11, probe, refuse, now_ms);
  }
  CHECK(!states.may_return(known[1], now_ms));
  CHECK(states.usable(known, now_ms) == std::vector<std::size_t>{0});
}

TEST_CASE(a_stream_that_has_not_left_stays_if_the_kernel_takes_its_path_away_again) {
  Places paths({0, 0}, {0, 1}, 2);
  CHECK_EQ(paths.places_to_move(0b11, works, 1000), std::uint64_t{0b10});
  paths.set_link(1, false);
  const auto moves = paths.PlacePaths::places_to_move(0b11, fails, prepared<Prepared::kReady>, 2000);
  CHECK_EQ(moves.stay, std::uint64_t{0b10});
  CHECK_EQ(paths.moving(), std::uint64_t{0});
  // That is no refusal, after which there would be a pause.
  paths.set_link(1, true);
  CHECK_EQ(paths.places_to_move(0b11, works, 2000), std::uint64_t{0b10});
}

// Some firewalls answer for the hosts behind them.
TEST_CASE(a_path_that_opens_connections_and_no_stream_is_tried_less_often) {
  Places paths({0, 0}, {0, 1}, 2);
  std::int64_t now_ms = 1000000;
  int moves = 0;
  for (const std::int64_t end_ms = now_ms + 600000; now_ms < end_ms; now_ms += 1000) {
    if (paths.places_to_move(0b11, works, now_ms) == 0) continue;
    ++moves;
    paths.on_lost(1, false, now_ms);
    now_ms += 10000;  // the time limit of the handshake
    paths.on_joined(1, 0, false, now_ms);
  }
  CHECK(moves > 5 && moves < 15);
}

TEST_CASE(a_stream_that_joins_later_belongs_to_its_path) {
  Places paths = two_paths();
  paths.on_joined(4, 1, true, 0);
  CHECK_EQ(paths.places_to_move(0b11111, works, 100000), std::uint64_t{0});
}

TEST_CASE(streams_that_join_later_move_to_the_path_that_lacks_some) {
  // Path 1 is left out: all four that join go over path 0.
  Places paths({0, 0}, {0, 1}, 2);
  for (std::size_t place = 2; place < 6; ++place) paths.on_joined(place, 0, true, 0);
  CHECK_EQ(paths.places_to_move(0b111111, fails, 100000), std::uint64_t{0});
  CHECK_EQ(paths.places_to_move(0b111111, works, 101000), std::uint64_t{0b001110});
  CHECK_EQ(paths.moving(), std::uint64_t{0b001110});
  for (const std::size_t place : {1, 2, 3}) {
    CHECK_EQ(paths.replacement_path(place, 0b110001), std::size_t{1});
    paths.on_joined(place, 1, false, 101000);
  }
  CHECK_EQ(paths.moving(), std::uint64_t{0});
  CHECK_EQ(paths.places_to_move(0b111111, works, 200000), std::uint64_t{0});
  // Two are given back.
  CHECK_EQ(paths.places_to_move(0b001111, works, 201000), std::uint64_t{0b000100});
}

}  // namespace bagua_net
