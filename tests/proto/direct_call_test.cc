// SPDX-License-Identifier: Apache-2.0
// Tests of proto/wire/direct_call: calls within a process keep the order, the flow control and the ends that
// reactors know from gRPC, whatever either side does and when.
#include "proto/wire/direct_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"

namespace lossd::wire {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kPatience = absl::Minutes(1);

grpc::ByteBuffer MessageOf(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

std::string TextOf(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(message.Dump(&slices).ok());
  std::string text;
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

// Checks that a side gets a reaction for each operation it has started, and OnDone when nothing else runs.
class OfOneSide {
 public:
  class Reaction {
   public:
    Reaction(OfOneSide* side, std::atomic<int>* under_way) : side_(side) {
      EXPECT_EQ(under_way->fetch_sub(1), 1);
      EXPECT_FALSE(side_->done_) << "a reaction after OnDone";
      ++side_->running_;
    }
    ~Reaction() { --side_->running_; }

   private:
    OfOneSide* const side_;
  };
  void StartsRead() { ++reads_; }
  void StartsWrite() { ++writes_; }
  Reaction Read() { return Reaction(this, &reads_); }
  Reaction Write() { return Reaction(this, &writes_); }
  void Done() {
    EXPECT_EQ(running_, 0) << "OnDone beside another reaction";
    EXPECT_EQ(reads_ + writes_, 0) << "OnDone before the reaction of an operation";
    EXPECT_FALSE(done_.exchange(true)) << "OnDone twice";
  }

 private:
  std::atomic<int> reads_{0};
  std::atomic<int> writes_{0};
  std::atomic<int> running_{0};
  std::atomic<bool> done_{false};
};

// What the server of a test does with a call.
struct Behaviour {
  int answers_before_end = 1 << 20;  // then it finishes with `end`
  grpc::Status end = grpc::Status::OK;
  bool reads = true;
  bool last_with_end = false;  // WriteAndFinish
};

// Answers each message with "re:" and the message, in order, and finishes when the client has no more.
class Echo final : public DirectServer::ServerReactor {
 public:
  Echo(CallContext* context, Behaviour behaviour, std::atomic<int>* open)
      : context_(context), behaviour_(std::move(behaviour)), open_(open) {
    ++*open_;
    absl::MutexLock lock(&mutex_);
    if (behaviour_.answers_before_end == 0) {
      End();
    } else if (behaviour_.reads) {
      Receive();
    }
  }

 private:
  void OnReadDone(bool ok) override {
    const auto reaction = side_.Read();
    absl::MutexLock lock(&mutex_);
    if (!ok) {
      no_more_ = true;
      if (!writing_) End();
      return;
    }
    queue_.push_back(absl::StrCat("re:", TextOf(received_)));
    if (!writing_) Write();
    if (!ended_) Receive();
  }
  void OnWriteDone(bool ok) override {
    const auto reaction = side_.Write();
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok || (queue_.empty() && no_more_) || ++answered_ >= behaviour_.answers_before_end) return End();
    if (!queue_.empty()) Write();
  }
  void OnCancel() override {
    EXPECT_TRUE(context_->IsCancelled());
    absl::MutexLock lock(&mutex_);
    if (!writing_) End();
  }
  void OnDone() override {
    side_.Done();
    --*open_;
    delete this;
  }

  void Receive() {
    side_.StartsRead();
    StartRead(&received_);
  }
  void Write() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ended_) return;
    answer_ = MessageOf(queue_.front());
    queue_.pop_front();
    writing_ = true;
    if (behaviour_.last_with_end && answered_ + 1 == behaviour_.answers_before_end) {
      ended_ = true;
      StartWriteAndFinish(&answer_, {}, behaviour_.end);
    } else {
      side_.StartsWrite();
      StartWrite(&answer_);
    }
  }
  void End() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!std::exchange(ended_, true)) Finish(behaviour_.end);
  }

  CallContext* const context_;
  const Behaviour behaviour_;
  std::atomic<int>* const open_;
  OfOneSide side_;
  grpc::ByteBuffer received_;
  absl::Mutex mutex_;
  std::deque<std::string> queue_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer answer_ ABSL_GUARDED_BY(mutex_);
  int answered_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool no_more_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

// Sends its messages and reads until the end.
class Sender final : public DirectServer::ClientReactor {
 public:
  explicit Sender(std::vector<std::string> messages, bool half_closes = true)
      : messages_(std::move(messages)), half_closes_(half_closes) {}

  // False: the server takes no calls.
  bool Start(DirectServer* server, const DirectCallOptions& options = {}) {
    call_ = server->Open(this, options);
    if (call_ == nullptr) return false;
    {
      absl::MutexLock lock(&mutex_);
      WriteNext();
      ReadNext();
    }
    StartCall();
    return true;
  }
  void Cancel() { call_->Cancel(); }
  DirectCall* call() { return call_.get(); }
  grpc::Status Await() {
    EXPECT_TRUE(over_.AwaitFor(kPatience));
    return status_;
  }
  std::vector<std::string> answers() {
    absl::MutexLock lock(&mutex_);
    return answers_;
  }
  int sent() {
    absl::MutexLock lock(&mutex_);
    return sent_;
  }

 private:
  void OnWriteDone(bool ok) override {
    const auto reaction = side_.Write();
    absl::MutexLock lock(&mutex_);
    if (!ok) return;
    ++sent_;
    WriteNext();
  }
  void OnReadDone(bool ok) override {
    const auto reaction = side_.Read();
    if (!ok) return;
    absl::MutexLock lock(&mutex_);
    answers_.push_back(TextOf(answer_));
    ReadNext();
  }
  void OnDone(const grpc::Status& status) override {
    side_.Done();
    status_ = status;
    over_.Notify();
  }
  void ReadNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    side_.StartsRead();
    StartRead(&answer_);
  }
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (next_ == messages_.size()) return;
    message_ = MessageOf(messages_[next_++]);
    side_.StartsWrite();
    if (next_ == messages_.size() && half_closes_) return StartWriteLast(&message_, {});
    StartWrite(&message_);
  }

  const std::vector<std::string> messages_;
  const bool half_closes_;
  std::shared_ptr<DirectCall> call_;
  OfOneSide side_;
  clocks::Event over_;
  grpc::Status status_;
  absl::Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  int sent_ ABSL_GUARDED_BY(mutex_) = 0;
  grpc::ByteBuffer message_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer answer_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> answers_ ABSL_GUARDED_BY(mutex_);
};

class DirectCallTest : public ::testing::Test {
 protected:
  explicit DirectCallTest(size_t max_message_bytes = 1 << 20)
      : server_(DirectServer::Create(max_message_bytes, [this](CallContext* context, uint64_t) {
          return new Echo(context, behaviour_, &open_);
        })) {}
  ~DirectCallTest() override {
    server_->Shutdown();
    EXPECT_EQ(open_, 0);
  }

  std::atomic<int> open_{0};  // server's reactors that have not had OnDone
  Behaviour behaviour_;
  std::shared_ptr<DirectServer> server_;
};

std::vector<std::string> Numbers(int count, size_t bytes = 0) {
  std::vector<std::string> numbers;
  for (int i = 0; i < count; ++i) numbers.push_back(absl::StrCat(i, std::string(bytes, 'x')));
  return numbers;
}

std::vector<std::string> AnswersTo(std::vector<std::string> messages) {
  for (std::string& message : messages) message.insert(0, "re:");
  return messages;
}

TEST_F(DirectCallTest, AnswersEachMessageInOrder) {
  for (const size_t bytes : {0, 1, 100, 300'000}) {
    Sender sender(Numbers(20, bytes));
    ASSERT_TRUE(sender.Start(server_.get()));
    EXPECT_TRUE(sender.Await().ok());
    EXPECT_EQ(sender.answers(), AnswersTo(Numbers(20, bytes)));
  }
}

TEST_F(DirectCallTest, EndsWithTheServersStatus) {
  for (const bool with_end : {false, true}) {
    behaviour_ = {.answers_before_end = 3,
                  .end = grpc::Status(grpc::StatusCode::ABORTED, "enough", "detail"),
                  .last_with_end = with_end};
    Sender sender(Numbers(10));
    ASSERT_TRUE(sender.Start(server_.get()));
    const grpc::Status status = sender.Await();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
    EXPECT_EQ(status.error_message(), "enough");
    EXPECT_EQ(status.error_details(), "detail");
    EXPECT_EQ(sender.answers(), AnswersTo(Numbers(3)));
  }
}

TEST_F(DirectCallTest, ARefusalComesWithoutAMessage) {
  behaviour_ = {.answers_before_end = 0, .end = grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining")};
  Sender sender(Numbers(2));
  ASSERT_TRUE(sender.Start(server_.get()));
  EXPECT_EQ(sender.Await().error_message(), "draining");
  EXPECT_THAT(sender.answers(), IsEmpty());
}

TEST_F(DirectCallTest, AWriteIsDoneWhenTheServerHasReadIt) {
  behaviour_.reads = false;
  Sender sender(Numbers(3));
  ASSERT_TRUE(sender.Start(server_.get()));
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(sender.sent(), 0);
  sender.Cancel();
  EXPECT_EQ(sender.Await().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(DirectCallTest, EndsAtItsDeadlineWhateverTheOrderOfCalls) {
  std::vector<std::unique_ptr<Sender>> senders;
  const absl::Time now = clocks::SteadyNow();
  for (const int milliseconds : {400, 50, 200}) {
    senders.push_back(std::make_unique<Sender>(Numbers(1), /*half_closes=*/false));
    ASSERT_TRUE(senders.back()->Start(server_.get(), {.deadline = now + absl::Milliseconds(milliseconds)}));
  }
  Sender without(Numbers(1), /*half_closes=*/false);
  ASSERT_TRUE(without.Start(server_.get()));
  for (const int first : {1, 2, 0}) {
    EXPECT_EQ(senders[first]->Await().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    EXPECT_TRUE(senders[first]->call()->DeadlineHasPassed());
  }
  EXPECT_GE(clocks::SteadyNow(), now + absl::Milliseconds(400));
  EXPECT_FALSE(without.call()->IsCancelled());
  without.Cancel();
  without.Await();
}

TEST_F(DirectCallTest, ALargerMessageThanEitherSideTakesEndsTheCall) {
  Sender sends(Numbers(2, 1 << 20));
  ASSERT_TRUE(sends.Start(server_.get()));
  grpc::Status status = sends.Await();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("1048577 bytes; the server takes at most 1048576"));
  Sender takes({"12345"});
  ASSERT_TRUE(takes.Start(server_.get(), {.max_message_bytes = 7}));  // "re:" makes it 8
  status = takes.Await();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("8 bytes; the client takes at most 7"));
}

// The memory of a message is the client's again when its write is done, even if the server keeps the message.
TEST_F(DirectCallTest, TheServerDoesNotReferToTheClientsMemory) {
  class Keeper final : public DirectServer::ServerReactor {
   public:
    explicit Keeper(grpc::ByteBuffer* kept, clocks::Event* has_read) : kept_(kept), has_read_(has_read) {
      StartRead(kept_);
    }
    void OnReadDone(bool) override {
      has_read_->Notify();
      Finish(grpc::Status::OK);
    }
    void OnDone() override { delete this; }

   private:
    grpc::ByteBuffer* const kept_;
    clocks::Event* const has_read_;
  };
  class Writer final : public DirectServer::ClientReactor {
   public:
    void OnDone(const grpc::Status&) override { over.Notify(); }
    clocks::Event over;
  };
  grpc::ByteBuffer kept;
  clocks::Event has_read;
  const auto server =
      DirectServer::Create(1 << 20, [&](CallContext*, uint64_t) { return new Keeper(&kept, &has_read); });
  std::string memory(1000, 'a');
  std::atomic<bool> released{false};
  Writer writer;
  {
    const grpc::Slice slice(
        memory.data(), memory.size(), [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; },
        &released);
    grpc::ByteBuffer message(&slice, 1);
    const auto call = server->Open(&writer, {});
    writer.StartWriteLast(&message, {});
    writer.StartCall();
    EXPECT_TRUE(writer.over.AwaitFor(kPatience));
    EXPECT_TRUE(has_read.happened());
  }
  EXPECT_TRUE(released);
  memory.assign(1000, 'b');
  EXPECT_EQ(TextOf(kept), std::string(1000, 'a'));
  server->Shutdown();
}

TEST_F(DirectCallTest, ACallWithAHoldIsNotDone) {
  class Holder final : public DirectServer::ClientReactor {
   public:
    void OnReadDone(bool ok) override {
      if (!ok) read_failed.Notify();
    }
    void OnDone(const grpc::Status&) override { over.Notify(); }
    clocks::Event read_failed, over;
    grpc::ByteBuffer answer;
  };
  behaviour_ = {.answers_before_end = 0};
  Holder holder;
  const auto call = server_->Open(&holder, {});
  holder.AddHold();
  holder.StartRead(&holder.answer);
  holder.StartCall();
  EXPECT_TRUE(holder.read_failed.AwaitFor(kPatience));
  EXPECT_FALSE(holder.over.AwaitFor(absl::Milliseconds(20)));
  holder.RemoveHold();
  EXPECT_TRUE(holder.over.AwaitFor(kPatience));
}

// The thread that begins a call runs reactions of the server, and those of a client that copies little.
TEST_F(DirectCallTest, AClientThatCopiesMuchDoesSoOnAnotherThread) {
  class Writer final : public DirectServer::ClientReactor {
   public:
    void OnWriteDone(bool) override { wrote_on = std::this_thread::get_id(); }
    void OnDone(const grpc::Status&) override { over.Notify(); }
    std::thread::id wrote_on;
    clocks::Event over;
  };
  behaviour_.answers_before_end = 1;
  for (const bool copies_much : {false, true}) {
    Writer writer;
    const grpc::ByteBuffer message = MessageOf("a");
    grpc::ByteBuffer answer;
    const auto call = server_->Open(&writer, {.client_copies_much = copies_much});
    writer.StartWriteLast(&message, {});
    writer.StartRead(&answer);
    writer.StartCall();
    ASSERT_TRUE(writer.over.AwaitFor(kPatience));
    EXPECT_EQ(writer.wrote_on == std::this_thread::get_id(), !copies_much);
  }
}

TEST_F(DirectCallTest, ShutdownEndsOpenCallsAndTakesNoMore) {
  std::vector<std::unique_ptr<Sender>> senders;
  for (int i = 0; i < 20; ++i) {
    senders.push_back(std::make_unique<Sender>(Numbers(3), /*half_closes=*/false));
    ASSERT_TRUE(senders.back()->Start(server_.get()));
  }
  server_->Shutdown();
  EXPECT_EQ(open_, 0);
  for (const auto& sender : senders) {
    EXPECT_EQ(sender->Await().error_code(), grpc::StatusCode::UNAVAILABLE);
  }
  Sender late(Numbers(1));
  EXPECT_FALSE(late.Start(server_.get()));
  server_->Shutdown();  // does nothing
}

TEST_F(DirectCallTest, IsFoundByItsNamesUntilShutdown) {
  server_->Publish("unix:/a");
  server_->Publish("127.0.0.1:1");
  EXPECT_EQ(DirectServer::Find("unix:/a"), server_);
  EXPECT_EQ(DirectServer::Find("127.0.0.1:1"), server_);
  EXPECT_EQ(DirectServer::Find("unix:/b"), nullptr);
  const auto other = DirectServer::Create(1, [](CallContext*, uint64_t) { return nullptr; });
  other->Publish("unix:/a");
  EXPECT_EQ(DirectServer::Find("unix:/a"), other);
  server_->Shutdown();
  EXPECT_EQ(DirectServer::Find("127.0.0.1:1"), nullptr);
  EXPECT_EQ(DirectServer::Find("unix:/a"), other);
  other->Shutdown();
  EXPECT_EQ(DirectServer::Find("unix:/a"), nullptr);
  EXPECT_NE(DirectServer::NextClient(), DirectServer::NextClient());
}

// Many calls at once, each of which ends in its own way: by itself, cancelled by its client at any time, at a
// deadline, by the server's Finish, or at Shutdown. Answers are a beginning of what a whole call would have.
TEST_F(DirectCallTest, AnyEndAtAnyTime) {
  std::random_device seed_source;
  const unsigned seed = seed_source();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 draw(seed);
  const auto upto = [&draw](int most) { return std::uniform_int_distribution<int>(0, most)(draw); };
  constexpr int kCalls = 600;
  std::vector<std::unique_ptr<Sender>> senders;
  std::vector<std::vector<std::string>> sent;
  std::vector<std::thread> cancellers;
  for (int i = 0; i < kCalls; ++i) {
    sent.push_back(Numbers(1 + upto(8), upto(9) == 0 ? 100'000 : 10));
    senders.push_back(std::make_unique<Sender>(sent.back(), upto(3) > 0));
    DirectCallOptions options;
    if (upto(3) == 0) options.deadline = clocks::SteadyNow() + absl::Microseconds(upto(3000));
    ASSERT_TRUE(senders.back()->Start(server_.get(), options));
    if (upto(2) != 0) continue;
    cancellers.emplace_back([sender = senders.back().get(), wait = absl::Microseconds(upto(500))] {
      absl::SleepFor(wait);
      sender->Cancel();
    });
  }
  for (std::thread& canceller : cancellers) canceller.join();
  server_->Shutdown();
  for (int i = 0; i < kCalls; ++i) {
    const grpc::Status status = senders[i]->Await();
    const std::vector<std::string> whole = AnswersTo(sent[i]);
    const std::vector<std::string> got = senders[i]->answers();
    ASSERT_LE(got.size(), whole.size());
    EXPECT_TRUE(std::equal(got.begin(), got.end(), whole.begin())) << i;
    if (status.ok()) {
      EXPECT_EQ(got, whole) << i;
    }
  }
}

}  // namespace
}  // namespace lossd::wire
