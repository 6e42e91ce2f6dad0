// SPDX-License-Identifier: Apache-2.0
// Distillation in the engine: streams of one head, the student, whose rows are compared with another head of
// the engine, the teacher. TeacherOf says what a stream knows of its teacher, Teaching what a head knows of
// the streams that it teaches, and CheckDistillation lets such a stream begin.
//
// A teacher is frozen. It cannot be deleted while such streams are open, and its chunks in flight include
// those of its students, so that operations on it wait for them. Streams end when its weights change.
//
// Guarded by the engine's lock, which is held in all calls.
#ifndef LOSSD_SERVER_ENGINE_TEACHING_H_
#define LOSSD_SERVER_ENGINE_TEACHING_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "server/engine/device_loop.h"
#include "server/engine/stream.h"

namespace lossd::engine {

class HeadSession;

// The teacher of a stream: the head, and what the stream rests on. Plain data; constant while the stream is
// open. The stream keeps the session, but not the head, which goes when it is deleted.
struct TeacherOf {
  std::shared_ptr<HeadSession> session;  // null: the stream has no teacher
  int64_t hidden_size = 0;
  uint64_t weights_version = 0;

  explicit operator bool() const { return session != nullptr; }
  // ABORTED if the teacher has other weights than when the stream was opened.
  absl::Status CheckBound() const;
};

// A head as a teacher: the open streams of other heads that it teaches.
class Teaching {
 public:
  // `kernels`: of the head.
  explicit Teaching(const kernels::HeadKernels* kernels) : kernels_(kernels) {}

  // Only for what is the same as long as the head is there; not once it is being deleted.
  const kernels::HeadKernels& kernels() const { return *kernels_; }
  // The head ends.
  void OnHeadGone() { kernels_ = nullptr; }
  // HeadKernels::paging() as long as the head is there.
  std::optional<kernels::PagingStats> paging() const {
    return kernels_ == nullptr ? std::nullopt : kernels_->paging();
  }
  // Where the head's values are.
  ValuesAre values() const;
  void Begin(HeadSession* student) { ++streams_[student]; }
  void End(HeadSession* student) {
    const auto it = streams_.find(student);
    if (--it->second == 0) streams_.erase(it);
  }
  int64_t streams() const;
  // Heads with such streams.
  std::vector<HeadSession*> students() const;

 private:
  const kernels::HeadKernels* kernels_;
  std::map<HeadSession*, int64_t> streams_;
};

// Whether a stream of `student` may have this teacher, a published head; completes spec->options. Errors as
// lossd.v1.Distillation says, with fields named "open...".
absl::StatusOr<TeacherOf> CheckDistillation(HeadSession& student, std::shared_ptr<HeadSession> teacher,
                                            StreamSpec* spec);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_TEACHING_H_
