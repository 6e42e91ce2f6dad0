// SPDX-License-Identifier: Apache-2.0
// The caller's end of a stream.
#ifndef LOSSD_SERVER_ENGINE_STREAM_HANDLE_H_
#define LOSSD_SERVER_ENGINE_STREAM_HANDLE_H_

#include <memory>
#include <vector>

#include "server/engine/head_session.h"
#include "server/engine/stream.h"
#include "server/engine/stream_state.h"

namespace lossd::engine {

class StreamHandle final : public Stream {
 public:
  StreamHandle(std::shared_ptr<HeadSession> session, std::shared_ptr<StreamState> state)
      : session_(std::move(session)), state_(std::move(state)) {}
  ~StreamHandle() override;

  absl::string_view head() const override { return state_->spec().head; }
  uint64_t microbatch_id() const override { return state_->spec().microbatch_id; }
  HeadState state() const override { return state_->head_state(); }
  SliceLimits limits() const override { return state_->limits(); }
  int64_t hidden_size() const override { return state_->hidden_size(); }

  void Start() override;
  void Receive(IncomingSlice slice) override;
  std::vector<RowRange> RetainedSlices() const override { return state_->RetainedSlices(); }
  void HalfClose() override;
  void Cancel(absl::Status why) override;

 private:
  const std::shared_ptr<HeadSession> session_;
  const std::shared_ptr<StreamState> state_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STREAM_HANDLE_H_
