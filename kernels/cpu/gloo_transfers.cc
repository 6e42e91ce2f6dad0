// SPDX-License-Identifier: Apache-2.0
// GlooTransfers: HostTransfers over TCP (CreateGlooTransfers in gloo_link.h). Gloo connects each rank with
// each other rank by a pair of sockets, and reports errors as exceptions; Call turns them into Status.
//
// A failure ends everything: it is kept, this rank closes its connections, and so the other ranks fail as
// well instead of waiting for this one.
#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <exception>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cpu/gloo_link.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::kernels {
namespace {

// All transfers use one slot, so sends and receives match in their order.
constexpr uint64_t kSlot = 1;

class GlooTransfers final : public HostTransfers {
 public:
  GlooTransfers(Replica replica, std::string host, absl::Duration timeout)
      : replica_(replica), host_(std::move(host)), timeout_(timeout) {}

  Replica replica() const override { return replica_; }
  absl::StatusOr<std::string> Address() override;
  absl::Status Connect(const std::vector<std::string>& addresses) override;
  absl::Status Exchange(absl::Span<const RankTransfer> send, absl::Span<const RankTransfer> receive) override;
  void Abort(const absl::Status& reason) override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Calls a function of Gloo, which reports errors as exceptions. After an error, closes the connections.
  absl::Status Call(const std::string& what, absl::FunctionRef<void()> call) ABSL_LOCKS_EXCLUDED(mutex_);
  // Closes the connections, so that other ranks do not wait for this one.
  void Close();
  absl::Status failure() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Keeps the first failure, and returns it.
  absl::Status Fail(absl::Status failure) ABSL_LOCKS_EXCLUDED(mutex_);

  const Replica replica_;
  const std::string host_;
  const absl::Duration timeout_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;  // its pairs are thread-safe

  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  bool connecting_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<gloo::transport::UnboundBuffer*> waiting_ ABSL_GUARDED_BY(mutex_);
};

absl::Status GlooTransfers::failure() const {
  absl::MutexLock lock(&mutex_);
  return failure_;
}

absl::Status GlooTransfers::Fail(absl::Status failure) {
  absl::MutexLock lock(&mutex_);
  failure_.Update(std::move(failure));
  return failure_;
}

// Called by any thread. A thread that waits in Exchange wakes up by its buffers; a thread that still
// connects, by the closed sockets.
void GlooTransfers::Abort(const absl::Status& reason) {
  bool connecting = false;
  {
    absl::MutexLock lock(&mutex_);
    failure_.Update(reason);
    connecting = connecting_;
    for (gloo::transport::UnboundBuffer* buffer : waiting_) {
      buffer->abortWaitSend();
      buffer->abortWaitRecv();
    }
  }
  if (connecting) Close();
}

absl::Status GlooTransfers::Call(const std::string& what, absl::FunctionRef<void()> call) {
  LOSSD_RETURN_IF_ERROR(failure());
  try {
    call();
    return failure();
  } catch (const std::exception& error) {
    Fail(absl::UnavailableError(
             absl::StrCat("rank ", replica_.index, " could not ", what, ": ", error.what())))
        .IgnoreError();
  }
  Close();
  return failure();
}

absl::Status GlooTransfers::Exchange(absl::Span<const RankTransfer> send,
                                     absl::Span<const RankTransfer> receive) {
  // For errors; for_each makes it name the transfer that is under way.
  std::string what = "exchange with the other ranks";
  return Call(what, [&] {
    std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> buffers;
    for (const auto transfers : {receive, send}) {
      for (const RankTransfer& transfer : transfers) {
        buffers.push_back(context_->createUnboundBuffer(transfer.data, transfer.bytes));
      }
    }
    {
      absl::MutexLock lock(&mutex_);
      if (!failure_.ok()) return;
      for (const auto& buffer : buffers) waiting_.push_back(buffer.get());
    }
    const absl::Cleanup not_waiting = [this] {
      absl::MutexLock lock(&mutex_);
      waiting_.clear();
    };
    const auto for_each =
        [&](absl::FunctionRef<void(bool receives, int rank, gloo::transport::UnboundBuffer&)> call) {
          for (size_t i = 0; i < buffers.size(); ++i) {
            const bool receives = i < receive.size();
            const int rank = receives ? receive[i].rank : send[i - receive.size()].rank;
            what = absl::StrCat(receives ? "receive from rank " : "send to rank ", rank);
            call(receives, rank, *buffers[i]);
          }
        };
    for_each([](bool receives, int rank, gloo::transport::UnboundBuffer& buffer) {
      receives ? buffer.recv(rank, kSlot) : buffer.send(rank, kSlot);
    });
    for_each([](bool receives, int, gloo::transport::UnboundBuffer& buffer) {
      if (!(receives ? buffer.waitRecv() : buffer.waitSend()))
        throw std::runtime_error("the transfer was aborted");
    });
  });
}

void GlooTransfers::Close() {
  for (int rank = 0; context_ != nullptr && rank < replica_.count; ++rank) {
    try {
      if (context_->getPair(rank) != nullptr) context_->getPair(rank)->close();
    } catch (const std::exception&) {
      // The connection is closed already, or was never open.
    }
  }
}

// Makes a pair of sockets for each other rank. The result has the addresses of all pairs, of the same length,
// in the order of the ranks, and zeros in the place of this rank.
absl::StatusOr<std::string> GlooTransfers::Address() {
  std::string all;
  absl::Status status = Call("listen for the other ranks", [&] {
    gloo::transport::tcp::attr attributes(host_.c_str());
    device_ = gloo::transport::tcp::CreateDevice(attributes);
    context_ = device_->createContext(replica_.index, replica_.count);
    context_->setTimeout(absl::ToChronoMilliseconds(timeout_));
    size_t each = 0;
    for (int rank = 0; rank < replica_.count; ++rank) {
      if (rank == replica_.index) continue;
      const std::vector<char> address = context_->createPair(rank)->address().bytes();
      each = address.size();
      all.append(address.begin(), address.end());
    }
    all.insert(static_cast<size_t>(replica_.index) * each, each, '\0');
  });
  if (!status.ok()) return status;
  return all;
}

absl::Status GlooTransfers::Connect(const std::vector<std::string>& addresses) {
  const auto count = static_cast<size_t>(replica_.count);
  if (addresses.size() != count) {
    return errors::FieldError("addresses", absl::StrCat("be those of ", count, " ranks"), addresses.size());
  }
  {
    absl::MutexLock lock(&mutex_);
    connecting_ = true;
  }
  const absl::Cleanup connected = [this] {
    absl::MutexLock lock(&mutex_);
    connecting_ = false;
  };
  return Call("connect with the other ranks", [&] {
    for (int rank = 0; rank < replica_.count; ++rank) {
      if (rank == replica_.index) continue;
      // The address of the pair that the other rank has made for this rank (Address).
      const std::string& all = addresses[static_cast<size_t>(rank)];
      const auto own =
          all.begin() + static_cast<std::ptrdiff_t>(all.size() / count * static_cast<size_t>(replica_.index));
      context_->getPair(rank)->connect({own, own + static_cast<std::ptrdiff_t>(all.size() / count)});
    }
  });
}

}  // namespace

bool HaveGloo() { return true; }

absl::StatusOr<std::unique_ptr<HostTransfers>> CreateGlooTransfers(Replica replica, const std::string& host,
                                                                   absl::Duration timeout) {
  return std::make_unique<GlooTransfers>(replica, host, timeout);
}

}  // namespace lossd::kernels
