// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/blocking_stream.h"

#include "client/cpp/connections.h"

namespace lossd::client::internal {

BlockingStream::BlockingStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                               const Peer& peer, absl::Time deadline)
    : peer_(peer), stub_(channel) {
  SetDeadline(deadline, &context_);
  stub_.PrepareBidiStreamingCall(&context_, method, {}, &reactor_);
  reactor_.AddHold();  // operations start outside of reactions
  reactor_.StartCall();
}

BlockingStream::~BlockingStream() {
  if (finished_) return;
  Cancel();
  (void)Finish();
}

bool BlockingStream::Write(const grpc::ByteBuffer& buffer) {
  reactor_.StartWrite(&buffer);
  return reactor_.Await();
}

bool BlockingStream::WritesDone() {
  reactor_.StartWritesDone();
  return reactor_.Await();
}

bool BlockingStream::Read(grpc::ByteBuffer* buffer) {
  reactor_.StartRead(buffer);
  return reactor_.Await();
}

absl::Status BlockingStream::Finish() {
  finished_ = true;
  reactor_.RemoveHold();
  return CallStatus(reactor_.AwaitDone(), peer_);
}

void BlockingStream::Reactor::OnDone(const grpc::Status& status) {
  absl::MutexLock lock(&mu_);
  status_ = status;
  done_ = true;
}

void BlockingStream::Reactor::Complete(bool ok) {
  absl::MutexLock lock(&mu_);
  ok_ = ok;
  complete_ = true;
}

bool BlockingStream::Reactor::Await() {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&complete_));
  complete_ = false;
  return ok_;
}

grpc::Status BlockingStream::Reactor::AwaitDone() {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&done_));
  return status_;
}

}  // namespace lossd::client::internal
