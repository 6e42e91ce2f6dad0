// A TCP proxy on a loopback port that cuts its connections: for tests of what survives that.
//
// Thread-safe.
#ifndef LOSSD_TESTS_CLIENT_CUT_PROXY_H_
#define LOSSD_TESTS_CLIENT_CUT_PROXY_H_

#include <atomic>
#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace lossd::test {

class CutProxy {
 public:
  // Forwards to `target` ("127.0.0.1:port"). Each connection is cut after a random number of bytes, in both
  // directions together, of `mean_bytes` on average; 0: never.
  CutProxy(const std::string& target, uint64_t mean_bytes, uint64_t seed);
  ~CutProxy();

  std::string target() const;
  // From now on connections live.
  void StopCutting() { mean_bytes_ = 0; }
  int64_t cuts() const { return cuts_; }

 private:
  void Accept();
  void Forward(int client);
  // Copies what has arrived at `from`; false when the connection is over.
  bool Copy(int from, int to, int64_t* budget);
  int64_t DrawBudget();

  const uint16_t target_port_;
  uint16_t port_ = 0;
  int listener_ = -1;
  std::atomic<uint64_t> mean_bytes_;
  std::atomic<int64_t> cuts_{0};
  std::atomic<bool> stopping_{false};
  absl::Mutex mu_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> forwarders_ ABSL_GUARDED_BY(mu_);
  std::thread acceptor_;
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_CLIENT_CUT_PROXY_H_
