#include "transport/tuning/thread_load.h"

#include "support/check.h"

using bagua_net::PollingTime;

TEST_CASE(it_polls_long_while_the_waits_are_short) {
  PollingTime time;
  CHECK_EQ(time.us(), PollingTime::kLongUs);
  for (int i = 0; i < 100; ++i) time.add_wait(150);
  CHECK_EQ(time.us(), PollingTime::kLongUs);
}

TEST_CASE(a_slow_network_lets_it_sleep) {
  PollingTime time;
  for (int i = 0; i < 10; ++i) time.add_wait(1000);
  CHECK_EQ(time.us(), PollingTime::kShortUs);
}

TEST_CASE(one_pause_is_soon_forgotten) {
  PollingTime time;
  for (int i = 0; i < 10; ++i) time.add_wait(50);
  time.add_wait(1'000'000'000);
  CHECK_EQ(time.us(), PollingTime::kShortUs);
  time.add_wait(50);
  CHECK_EQ(time.us(), PollingTime::kLongUs);
}
