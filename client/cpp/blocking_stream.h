// SPDX-License-Identifier: Apache-2.0
// A bidirectional gRPC call over raw byte buffers, used from one thread that blocks: for tensor transfers,
// where the generated stubs would copy payloads through strings.
//
// Thread-compatible. One thread writes and reads, in any order.
#ifndef LOSSD_CLIENT_CPP_BLOCKING_STREAM_H_
#define LOSSD_CLIENT_CPP_BLOCKING_STREAM_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/peer.h"

namespace lossd::client::internal {

class BlockingStream {
 public:
  BlockingStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method, const Peer& peer,
                 absl::Time deadline);
  // Cancels if Finish was not called.
  ~BlockingStream();
  BlockingStream(const BlockingStream&) = delete;
  BlockingStream& operator=(const BlockingStream&) = delete;

  // False if the call has ended; Finish tells why. Write takes the buffer's references until it returns, the
  // transport possibly longer.
  bool Write(const grpc::ByteBuffer& buffer);
  bool WritesDone();
  bool Read(grpc::ByteBuffer* buffer);

  void Cancel() { context_.TryCancel(); }
  // The server's status. Waits for it: call after Read returned false, or after Cancel.
  absl::Status Finish();

 private:
  class Reactor : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    void OnReadDone(bool ok) override { Complete(ok); }
    void OnWriteDone(bool ok) override { Complete(ok); }
    void OnWritesDoneDone(bool ok) override { Complete(ok); }
    void OnDone(const grpc::Status& status) override;

    // The outcome of the one operation under way.
    bool Await();
    grpc::Status AwaitDone();

   private:
    void Complete(bool ok);

    absl::Mutex mu_;
    bool complete_ ABSL_GUARDED_BY(mu_) = false;
    bool ok_ ABSL_GUARDED_BY(mu_) = false;
    bool done_ ABSL_GUARDED_BY(mu_) = false;
    grpc::Status status_ ABSL_GUARDED_BY(mu_);
  };

  const Peer peer_;
  grpc::ClientContext context_;
  grpc::GenericStub stub_;
  Reactor reactor_;
  bool finished_ = false;
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_BLOCKING_STREAM_H_
