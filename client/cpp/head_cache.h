// What the client remembers of heads between calls: the limits on slices, and in which incarnation of the
// server gradients were accumulated.
//
// Thread-safe. Bounded by the number of heads the client has used.
#ifndef LOSSD_CLIENT_CPP_HEAD_CACHE_H_
#define LOSSD_CLIENT_CPP_HEAD_CACHE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/client.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::client::internal {

struct HeadInfo {
  uint64_t hidden_size = 0;  // D
  v1::SliceLimits limits;
};

// ABORTED, with a Restart: the server was another process before, and what it had accumulated for `step` is
// gone.
absl::Status RestartedError(absl::string_view head, uint64_t before, uint64_t now,
                            std::optional<uint64_t> step);
// The same where no head is known.
absl::Status RestartedError(uint64_t before, uint64_t now);

std::optional<Restart> RestartIn(const absl::Status& status);

class HeadCache {
 public:
  // `expected_incarnation`: ClientOptions's.
  explicit HeadCache(uint64_t expected_incarnation) : expected_incarnation_(expected_incarnation) {}

  std::optional<HeadInfo> Facts(absl::string_view head) const;
  void Learn(const v1::HeadDescription& description);
  // The head's facts are to be learnt anew; what was accumulated stays remembered.
  void ForgetFacts(absl::string_view head);

  // Gradients of `step` are being accumulated in `incarnation`. ABORTED if earlier ones of the same step went
  // to another one, or if another one is expected; then nothing changes.
  absl::Status NoteAccumulation(absl::string_view head, uint64_t step, uint64_t incarnation);
  // Where further rows of `step` have to go, since earlier ones went there or since it is expected; nullopt:
  // anywhere.
  std::optional<uint64_t> IncarnationOf(absl::string_view head, uint64_t step) const;
  // ABORTED if gradients of `step` were accumulated in another incarnation than `incarnation`, or if another
  // one is expected.
  absl::Status CheckIncarnation(absl::string_view head, uint64_t step, uint64_t incarnation) const;
  // The step has been applied: its gradients are not outstanding any more, those of a later one are.
  void CloseStep(absl::string_view head, uint64_t step);
  // No gradients of the head are outstanding any more, whatever the incarnation.
  void ForgetAccumulation(absl::string_view head);

 private:
  struct Accumulation {
    uint64_t step = 0;
    uint64_t incarnation = 0;
  };

  absl::Status Check(absl::string_view head, uint64_t step, uint64_t incarnation) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const uint64_t expected_incarnation_;
  mutable absl::Mutex mu_;
  absl::flat_hash_set<std::string> acknowledged_ ABSL_GUARDED_BY(mu_);  // heads for which nothing is expected
  absl::flat_hash_map<std::string, HeadInfo> facts_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, Accumulation> accumulations_ ABSL_GUARDED_BY(mu_);
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_HEAD_CACHE_H_
