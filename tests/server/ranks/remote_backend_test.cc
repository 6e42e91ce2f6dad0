// SPDX-License-Identifier: Apache-2.0
// Tensors of a worker that the leader reads and writes in pieces: several are under way at once, not more,
// and an error is that of the first piece that fails.
#include "server/ranks/remote_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace lossd::ranks::remote_backend_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHidden = int64_t{1} << 18;  // so that a piece has four rows
constexpr size_t kRowBytes = kHidden * sizeof(float);
constexpr int64_t kPieceRows = kPieceBytes / static_cast<int64_t>(kRowBytes);
constexpr int64_t kVocab = 40;
constexpr auto kFloat = kernels::DType::kFloat32;
constexpr kernels::TensorId kWeight = {kernels::Param::kWeight, kernels::Role::kValue};

// A worker that answers the oldest request when as many wait as may be under way, or no more are to come.
class PatientWorker final : public WorkerTransport {
 public:
  // `all`: requests that will come. `answer` fills an answer in; on the stream's reading thread.
  PatientWorker(int all, std::function<void(const v1::Request&, v1::Answer&)> answer)
      : all_(all), answer_(std::move(answer)) {}

  bool Read(v1::FromWorker* message) override {
    v1::Request request;
    {
      absl::MutexLock lock(&mutex_);
      const auto due = [this] {
        mutex_.AssertHeld();
        const bool enough = waiting_.size() >= kPiecesUnderWay || came_ >= all_ || hurried_;
        return ended_ || (enough && !waiting_.empty());
      };
      mutex_.Await(absl::Condition(&due));
      if (ended_) return false;
      request = std::move(waiting_.front());
      waiting_.pop_front();
    }
    message->mutable_answer()->Clear();
    message->mutable_answer()->set_request(request.id());
    if (!request.destroy()) answer_(request, *message->mutable_answer());
    return true;
  }
  bool Write(const v1::ToWorker& message) override {
    absl::MutexLock lock(&mutex_);
    if (!message.request().destroy()) ++came_;
    hurried_ = hurried_ || message.request().destroy();
    waiting_.push_back(message.request());
    most_ = std::max(most_, waiting_.size());
    return true;
  }
  void Cancel() override {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
  }
  // From now on every request is answered at once.
  void Hurry() {
    absl::MutexLock lock(&mutex_);
    hurried_ = true;
  }
  size_t most() {
    absl::MutexLock lock(&mutex_);
    return most_;
  }
  int came() {
    absl::MutexLock lock(&mutex_);
    return came_;
  }

 private:
  const int all_;
  const std::function<void(const v1::Request&, v1::Answer&)> answer_;
  absl::Mutex mutex_;
  std::deque<v1::Request> waiting_ ABSL_GUARDED_BY(mutex_);
  int came_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t most_ ABSL_GUARDED_BY(mutex_) = 0;
  bool hurried_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

// A head of a played worker.
class Remote {
 public:
  Remote(int all, std::function<void(const v1::Request&, v1::Answer&)> answer)
      : worker_(all, std::move(answer)),
        stream_(std::make_shared<WorkerStream>(v1::Hello(), &worker_)),
        head_(std::make_unique<RemoteHead>(
            kernels::HeadConfig{.hidden_size = kHidden, .vocab_size = kVocab, .compute_dtype = kFloat}, 1,
            v1::HeadDescription(), stream_)),
        reader_([this] { stream_->Run([](const absl::Status&) {}, [](const std::string&) {}); }) {}
  ~Remote() {
    head_.reset();
    worker_.Cancel();
    reader_.join();
  }
  PatientWorker& worker() { return worker_; }
  RemoteHead& head() { return *head_; }

 private:
  PatientWorker worker_;
  std::shared_ptr<WorkerStream> stream_;
  std::unique_ptr<RemoteHead> head_;
  std::thread reader_;
};

// What row `row` holds everywhere.
char Content(int64_t row) { return static_cast<char>(row + 1); }

std::string Rows(int64_t first, int64_t rows) {
  std::string bytes;
  for (int64_t row = first; row < first + rows; ++row) bytes.append(kRowBytes, Content(row));
  return bytes;
}

absl::Span<const uint8_t> BytesOf(const std::string& bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

TEST(RemoteBackendTest, PiecesOfAReadAreUnderWayTogether) {
  constexpr int64_t kFirst = 3, kCount = 35;  // nine pieces, the last with three rows
  Remote remote(9, [](const v1::Request& request, v1::Answer& answer) {
    answer.set_payload(Rows(request.read().row_begin(), request.read().rows()));
  });
  std::string out(kCount * kRowBytes, 0);
  const absl::Status status = remote.head().ReadTensor(kWeight, kFirst, kCount, kFloat,
                                                       {reinterpret_cast<uint8_t*>(out.data()), out.size()});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(out, Rows(kFirst, kCount));
  EXPECT_EQ(remote.worker().came(), 9);
  EXPECT_EQ(remote.worker().most(), kPiecesUnderWay);
}

TEST(RemoteBackendTest, SoAreThoseOfAWriteAndAnAddition) {
  for (const bool add : {false, true}) {
    SCOPED_TRACE(add ? "AddGradient" : "WriteTensor");
    absl::Mutex mutex;
    std::string got;
    Remote remote(10, [&](const v1::Request& request, v1::Answer&) {
      const v1::TensorAccess& access = add ? request.add() : request.write();
      absl::MutexLock lock(&mutex);
      EXPECT_EQ(static_cast<size_t>(access.row_begin()) * kRowBytes, got.size());
      EXPECT_EQ(access.scale(), add ? 0.5f : 0.0f);
      got += access.payload();
    });
    const std::string in = Rows(0, kVocab);
    const absl::Status status =
        add ? remote.head().AddGradient(kernels::Param::kWeight, 0, kVocab, kFloat, 0.5f, BytesOf(in))
            : remote.head().WriteTensor(kWeight, 0, kVocab, kFloat, BytesOf(in));
    ASSERT_TRUE(status.ok()) << status;
    absl::MutexLock lock(&mutex);
    EXPECT_EQ(got, in);
    EXPECT_EQ(remote.worker().most(), kPiecesUnderWay);
  }
}

TEST(RemoteBackendTest, TheFirstPieceThatFailsIsTheError) {
  for (const int64_t failing : {0, 1, 8, 9}) {
    SCOPED_TRACE(failing);
    Remote remote(10, [failing](const v1::Request& request, v1::Answer& answer) {
      const int64_t piece = request.write().row_begin() / kPieceRows;
      if (piece < failing) return;
      answer.mutable_status()->set_code(static_cast<int>(absl::StatusCode::kInternal));
      answer.mutable_status()->set_message(absl::StrCat("piece ", piece));
    });
    // With the last of those that may be under way comes the error, and nothing after it.
    if (failing + static_cast<int64_t>(kPiecesUnderWay) < 10) remote.worker().Hurry();
    const std::string in = Rows(0, kVocab);
    EXPECT_EQ(remote.head().WriteTensor(kWeight, 0, kVocab, kFloat, BytesOf(in)),
              absl::InternalError(absl::StrCat("piece ", failing)));
    EXPECT_LE(remote.worker().came(), failing + static_cast<int64_t>(kPiecesUnderWay));
  }
}

TEST(RemoteBackendTest, RowsOfAnotherLengthAreAnError) {
  Remote remote(10, [](const v1::Request& request, v1::Answer& answer) {
    answer.set_payload(Rows(0, request.read().row_begin() == 0 ? 1 : kPieceRows));
  });
  remote.worker().Hurry();
  std::string out(kVocab * kRowBytes, 0);
  const absl::Status status = remote.head().ReadTensor(kWeight, 0, kVocab, kFloat,
                                                       {reinterpret_cast<uint8_t*>(out.data()), out.size()});
  EXPECT_EQ(status, absl::InternalError("a worker sent rows of another length"));
}

TEST(RemoteBackendTest, AWorkerThatIsLostMeanwhileIsTheError) {
  std::function<void()> lose;
  Remote remote(10, [&lose](const v1::Request& request, v1::Answer&) {
    if (request.write().row_begin() >= 2 * kPieceRows) lose();
  });
  lose = [&] { remote.worker().Cancel(); };
  const std::string in = Rows(0, kVocab);
  const absl::Status status = remote.head().WriteTensor(kWeight, 0, kVocab, kFloat, BytesOf(in));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is lost"));
}

}  // namespace
}  // namespace lossd::ranks::remote_backend_test
