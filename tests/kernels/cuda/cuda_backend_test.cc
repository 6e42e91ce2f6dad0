// SPDX-License-Identifier: Apache-2.0
// What is particular to the CUDA backend: devices, memory, chunks in flight.
#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::cuda_backend_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

HeadConfig LargeConfig() {
  return {.hidden_size = 1024, .vocab_size = 50001, .has_bias = true, .compute_dtype = DType::kBFloat16};
}

TEST(CudaBackendWithoutGpu, IsUnavailableWithAReason) {
  if (HaveGpu()) GTEST_SKIP() << "this machine has a GPU";
  const auto backend = CreateCudaBackend({});
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(backend.status().message().empty());
}

TEST(CudaBackend, RefusesOptionsOutOfRange) {
  LOSSD_SKIP_WITHOUT_GPU();
  int count = 0;
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  struct Case {
    CudaBackendOptions options;
    std::string message;
  };
  const Case cases[] = {
      {{.device = count},
       absl::StrCat("device must be in [0, ", count, ") (GPUs found: ", count, "), got ", count)},
      {{.device = -1}, "got -1"},
      {{.workspace_bytes = -5}, "workspace_bytes must be >= 0, got -5"},
      {{.memory_limit_bytes = -6}, "memory_limit_bytes must be >= 0, got -6"},
      {{.max_chunk_rows = 0}, "max_chunk_rows must be >= 1, got 0"},
  };
  for (const Case& c : cases) {
    const auto backend = CreateCudaBackend(c.options);
    EXPECT_EQ(backend.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(backend.status().message()), HasSubstr(c.message));
  }
}

TEST(CudaBackend, LeavesTheWaitsOfItsProcessAlone) {
  LOSSD_SKIP_WITHOUT_GPU();
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  ASSERT_EQ(cudaFree(nullptr), cudaSuccess);
  unsigned before = 0;
  ASSERT_EQ(cudaGetDeviceFlags(&before), cudaSuccess);
  const unsigned spins = (before & ~static_cast<unsigned>(cudaDeviceScheduleMask)) | cudaDeviceScheduleSpin;
  ASSERT_EQ(cudaSetDeviceFlags(spins), cudaSuccess);
  ASSERT_TRUE(CreateCudaBackend({.shares_process = true}).ok());
  unsigned after = 0;
  EXPECT_EQ(cudaGetDeviceFlags(&after), cudaSuccess);
  EXPECT_EQ(after & cudaDeviceScheduleMask, static_cast<unsigned>(cudaDeviceScheduleSpin));
  EXPECT_EQ(cudaSetDeviceFlags(before), cudaSuccess);
}

// Work of the trainer whose process a server shares that ends when Release() is called, such as a collective
// that waits for another rank: on the default stream, and on one of its own.
class WaitingTrainer {
 public:
  WaitingTrainer() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&own_, cudaStreamNonBlocking), cudaSuccess);
    for (cudaStream_t stream : {static_cast<cudaStream_t>(nullptr), own_}) {
      EXPECT_EQ(cudaLaunchHostFunc(stream, Wait, &released_), cudaSuccess);
    }
  }
  ~WaitingTrainer() {
    Release();
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(own_), cudaSuccess);
  }
  void Release() {
    absl::MutexLock lock(&mutex_);
    if (!released_.HasBeenNotified()) released_.Notify();
  }

 private:
  static void CUDART_CB Wait(void* released) {
    static_cast<absl::Notification*>(released)->WaitForNotification();
  }

  cudaStream_t own_ = nullptr;
  absl::Mutex mutex_;
  absl::Notification released_;
};

// Says so if what is under way in its scope has not ended after a minute, and then releases the trainer, so
// that the test comes to an end.
class WithinAMinute {
 public:
  WithinAMinute(WaitingTrainer& trainer, const std::string& what)
      : watch_([this, &trainer, what] {
          if (ended_.WaitForNotificationWithTimeout(absl::Minutes(1))) return;
          ADD_FAILURE() << what << " waits for the trainer";
          trainer.Release();
        }) {}
  ~WithinAMinute() {
    ended_.Notify();
    watch_.join();
  }

 private:
  absl::Notification ended_;
  std::thread watch_;
};

TEST(CudaBackend, ComputesWhileATrainerInItsProcessWaits) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{64} << 20, .shares_process = true});
  ASSERT_TRUE(backend.ok()) << backend.status();
  ProblemSpec spec;
  spec.config = {.hidden_size = 128, .vocab_size = 2000, .compute_dtype = DType::kBFloat16};
  spec.config.optimizer_state = OptimizerState::kAdam;
  spec.hidden_dtype = DType::kBFloat16;
  spec.slice_rows = {300};
  // A head is made before: it computes chunks of several sizes once, and may wait for the GPU then.
  const std::unique_ptr<HeadKernels> head = MakeHead(**backend, MakeProblem(spec, rng));
  ASSERT_NE(head, nullptr);
  // One with enough classes for those that are sampled most often to be multiplied apart.
  ProblemSpec large = spec;
  large.config.vocab_size = 30000;
  auto roomy = CreateCudaBackend({.workspace_bytes = int64_t{256} << 20, .shares_process = true});
  ASSERT_TRUE(roomy.ok()) << roomy.status();
  const std::unique_ptr<HeadKernels> large_head = MakeHead(**roomy, MakeProblem(large, rng));
  ASSERT_NE(large_head, nullptr);
  WaitingTrainer trainer;
  large.options.gradients = Gradients::kSampled;
  for (const int64_t rows : {int64_t{1500}, int64_t{1500}, int64_t{2047}}) {
    WithinAMinute limit(trainer, absl::StrCat("a sampled chunk of ", rows, " rows of a large head"));
    ASSERT_GE(large_head->chunk_rows(), rows);
    large.slice_rows = {rows};
    EXPECT_TRUE(RunChunk(*large_head, MakeProblem(large, rng)).done.ok());
  }
  for (const Gradients gradients :
       {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    for (const int64_t rows :
         {int64_t{300}, int64_t{1}, int64_t{19}, int64_t{130}, head->chunk_rows() - 1, head->chunk_rows()}) {
      WithinAMinute limit(
          trainer, absl::StrCat("a chunk of ", rows, " rows with gradients ", static_cast<int>(gradients)));
      spec.options.gradients = gradients;
      spec.slice_rows = {rows};
      EXPECT_TRUE(RunChunk(*head, MakeProblem(spec, rng)).done.ok());
    }
  }
  for (const Embedding embedding : {Embedding::kRows, Embedding::kGradients}) {
    WithinAMinute limit(trainer, absl::StrCat("an embedding, ", static_cast<int>(embedding)));
    Problem problem = MakeProblem(spec, rng);
    problem.options = {.embedding = embedding};
    problem.accumulate_gradients = embedding == Embedding::kGradients;
    problem.slices.front().want_grad_hidden = embedding == Embedding::kRows;
    EXPECT_TRUE(RunChunk(*head, problem, {.want_row_outputs = false}).done.ok());
  }
  {
    WithinAMinute limit(trainer, "a step");
    EXPECT_TRUE(head->GradNorm().ok());
    EXPECT_TRUE(head->ApplyStep({.learning_rate = 1e-3}, 1).ok());
  }
  WithinAMinute limit(trainer, "memory of retained rows, and of a client");
  auto retained = (*backend)->AllocateRetained(1 << 20);
  ASSERT_TRUE(retained.ok()) << retained.status();
  std::vector<uint8_t> bytes(1000, 7), back(1000);
  EXPECT_TRUE((*retained)->WriteBytes(0, bytes).ok());
  EXPECT_TRUE((*retained)->ReadBytes(0, absl::MakeSpan(back)).ok());
  EXPECT_EQ(back, bytes);
  const auto staging = (*backend)->AllocateStaging(1 << 20);
  EXPECT_TRUE(staging.ok()) << staging.status();
  trainer.Release();  // what frees memory waits for it
}

// What a head computes when it is made leaves nothing behind.
TEST(CudaBackend, AHeadThatSharesAProcessBeginsAsAnyOther) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{64} << 20, .shares_process = true});
  ASSERT_TRUE(backend.ok()) << backend.status();
  for (const Gradients gradients : {Gradients::kExact, Gradients::kSampled, Gradients::kAuto}) {
    for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
      ProblemSpec spec;
      spec.config = {.hidden_size = 136, .vocab_size = 3000, .has_bias = true, .norm = Norm::kRmsNorm};
      spec.config.compute_dtype = spec.hidden_dtype = DType::kBFloat16;
      spec.config.gradients = gradients;
      spec.config.logits = logits;
      spec.slice_rows = {200};
      const Problem problem = MakeProblem(spec, rng);
      SCOPED_TRACE(Describe(problem));
      const auto head = (*backend)->CreateHead(spec.config);
      ASSERT_TRUE(head.ok()) << head.status();
      for (const Param param : {Param::kWeight, Param::kBias, Param::kNormGain}) {
        for (const float g : ReadGradient(**head, param)) ASSERT_EQ(g, 0.0f);
      }
      RunAndCompare(**backend, {problem});
    }
  }
}

// Rows of an embedding are written where they are wanted if that is memory of the GPU, and gradients are read
// there.
TEST(CudaBackend, EmbeddingRowsInMemoryOfTheGpu) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{64} << 20});
  ASSERT_TRUE(backend.ok()) << backend.status();
  for (const int64_t hidden : {int64_t{256}, int64_t{35}}) {
    ProblemSpec spec;
    spec.config = {.hidden_size = hidden, .vocab_size = 500, .compute_dtype = DType::kBFloat16};
    spec.config.optimizer_state = OptimizerState::kNone;
    spec.hidden_dtype = DType::kBFloat16;
    spec.slice_rows = {70, 33};
    const Problem problem = MakeProblem(spec, rng);
    const auto head = MakeHead(**backend, problem);
    ASSERT_NE(head, nullptr);
    // The first slice lies on the GPU, the second on the host.
    const size_t row_bytes = static_cast<size_t>(hidden) * 2;
    void* on_gpu = nullptr;
    ASSERT_EQ(cudaMalloc(&on_gpu, 70 * row_bytes), cudaSuccess);
    std::vector<uint8_t> on_host(33 * row_bytes), back(70 * row_bytes);
    Slice slices[2];
    for (size_t i : {0, 1}) {
      slices[i].rows = problem.slices[i].rows();
      slices[i].targets = problem.slices[i].targets.data();
      slices[i].grad_hidden = i == 0 ? on_gpu : on_host.data();
    }
    Chunk chunk;
    chunk.options.embedding = Embedding::kRows;
    chunk.accumulate_gradients = false;
    chunk.slices = absl::MakeSpan(slices);
    const auto run = [&] {
      absl::Status status;
      absl::Notification done;
      ChunkCallbacks callbacks;
      callbacks.on_results = [](absl::Status) {};
      callbacks.on_done = [&](absl::Status result) {
        status = std::move(result);
        done.Notify();
      };
      head->Submit(&chunk, std::move(callbacks));
      done.WaitForNotification();
      return status;
    };
    ASSERT_TRUE(run().ok());
    ASSERT_EQ(cudaMemcpy(back.data(), on_gpu, back.size(), cudaMemcpyDefault), cudaSuccess);
    for (size_t i : {0, 1}) {
      const std::vector<float> got = Decode(DType::kBFloat16, i == 0 ? back : on_host);
      for (size_t row = 0; row < problem.slices[i].targets.size(); ++row) {
        const int32_t id = problem.slices[i].targets[row];
        for (int64_t j = 0; j < hidden; ++j) {
          const float want =
              id == kIgnoredTarget ? 0.0f : problem.weight[static_cast<size_t>(id * hidden + j)];
          ASSERT_EQ(got[row * static_cast<size_t>(hidden) + static_cast<size_t>(j)],
                    RoundTo(DType::kBFloat16, want))
              << "slice " << i << " row " << row << " column " << j;
        }
      }
    }
    // The rows come back as their gradients: each class gets as many times its row as there are rows of it.
    for (Slice& slice : slices) slice.hidden = std::exchange(slice.grad_hidden, nullptr);
    chunk.options.embedding = Embedding::kGradients;
    chunk.accumulate_gradients = true;
    ASSERT_TRUE(run().ok());
    std::map<int32_t, int> rows_of;
    for (const SliceData& slice : problem.slices) {
      for (const int32_t id : slice.targets) rows_of[id] += 1;
    }
    const std::vector<float> gradient = ReadGradient(*head, Param::kWeight);
    for (size_t at = 0; at < gradient.size(); ++at) {
      const auto found = rows_of.find(static_cast<int32_t>(at / static_cast<size_t>(hidden)));
      const float want = RoundTo(DType::kBFloat16, problem.weight[at]) *
                         static_cast<float>(found == rows_of.end() ? 0 : found->second);
      ASSERT_NEAR(gradient[at], want, 1e-5f * std::fabs(want));
    }
    EXPECT_EQ(cudaFree(on_gpu), cudaSuccess);
  }
}

TEST(CudaBackend, RefusesHeadsBeyondTheLimitWithThePlan) {
  LOSSD_SKIP_WITHOUT_GPU();
  auto backend = CreateCudaBackend({.memory_limit_bytes = int64_t{256} << 20});
  ASSERT_TRUE(backend.ok()) << backend.status();
  const auto head = (*backend)->CreateHead(LargeConfig());
  EXPECT_EQ(head.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(head.status().message()), HasSubstr("gradients"));
  auto huge = LargeConfig();
  huge.vocab_size = 500'000'000;
  auto unlimited = CreateCudaBackend({});
  ASSERT_TRUE(unlimited.ok()) << unlimited.status();
  EXPECT_EQ((*unlimited)->CreateHead(huge).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE((*unlimited)->CreateHead(LargeConfig()).ok());
}

TEST(CudaBackend, MemoryFiguresAreWhatTheDeviceLoses) {
  LOSSD_SKIP_WITHOUT_GPU();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{1} << 30});
  ASSERT_TRUE(backend.ok()) << backend.status();
  size_t before = 0, after = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  const auto head = (*backend)->CreateHead(LargeConfig());
  ASSERT_TRUE(head.ok()) << head.status();
  ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  const MemoryBytes held = (*head)->memory();
  const auto planned = static_cast<double>(held.Total() - held[MemoryKind::kStaging]);
  EXPECT_NEAR(static_cast<double>(before - after), planned, 0.01 * planned);
  EXPECT_LE(held[MemoryKind::kWorkspace], int64_t{1} << 30);
  EXPECT_EQ((*head)->chunk_rows() % 8, 0);
}

// Beside a trainer that takes what it finds free, a head takes nothing more once it is there, but for the
// code of kernels that are loaded when they are first needed.
// Heads in host memory take the pool and one workspace, however many there are, and give all of it back.
TEST(CudaBackend, HeadsInHostMemoryShareTheirMemoryOfTheDevice) {
  LOSSD_SKIP_WITHOUT_GPU();
  HeadConfig config = LargeConfig();
  config.trainable = false;
  config.residency = Residency::kHost;
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{256} << 20});
  ASSERT_TRUE(backend.ok()) << backend.status();
  const auto of_pool = [&] { return (*backend)->memory().current[MemoryKind::kTeacherPool]; };
  const int64_t before = (*backend)->memory().current.Total();
  std::vector<std::unique_ptr<HeadKernels>> heads;
  int64_t of_one = 0;
  for (int i = 0; i < 3; ++i) {
    auto head = (*backend)->CreateHead(config);
    ASSERT_TRUE(head.ok()) << head.status();
    heads.push_back(*std::move(head));
    if (i == 0) of_one = of_pool();
    EXPECT_EQ(of_pool(), of_one);
    const MemoryBytes held = heads.back()->memory();
    EXPECT_EQ(held.OnDevice(), 0);
    EXPECT_EQ((*backend)->memory().current[MemoryKind::kHostValues], (i + 1) * held[MemoryKind::kHostValues]);
    EXPECT_GT(of_one, held[MemoryKind::kHostValues]);
    EXPECT_LE(of_one, held[MemoryKind::kHostValues] + (int64_t{256} << 20) + 3 * (int64_t{2} << 20));
  }
  heads.clear();
  EXPECT_EQ((*backend)->memory().current.Total(), before);

  auto small = CreateCudaBackend({.workspace_bytes = int64_t{64} << 20, .teacher_pool_bytes = 1 << 20});
  ASSERT_TRUE(small.ok()) << small.status();
  const absl::Status refused = (*small)->CreateHead(config).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("1048576 bytes (1.00 MiB) (--teacher_pool_bytes)"));
  EXPECT_EQ((*small)->PlanWholeHead(config, {}).status().code(), absl::StatusCode::kResourceExhausted);
  auto limited =
      CreateCudaBackend({.workspace_bytes = int64_t{64} << 20, .memory_limit_bytes = int64_t{64} << 20});
  ASSERT_TRUE(limited.ok()) << limited.status();
  EXPECT_THAT(std::string((*limited)->CreateHead(config).status().message()), HasSubstr("teacher_pool"));
  EXPECT_EQ((*limited)->memory().current[MemoryKind::kTeacherPool], 0);
}

TEST(CudaBackend, ComputingTakesNoMemoryOfTheDevice) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{256} << 20});
  ASSERT_TRUE(backend.ok()) << backend.status();
  ProblemSpec spec;
  spec.config = LargeConfig();
  spec.config.optimizer_state = OptimizerState::kAdam;
  spec.hidden_dtype = DType::kBFloat16;
  const Problem problem = MakeProblem(spec, rng);
  const auto head = MakeHead(**backend, problem);
  ASSERT_NE(head, nullptr);
  size_t before = 0, after = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  for (const Gradients gradients :
       {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
    spec.options.gradients = gradients;
    for (const int64_t rows : {head->chunk_rows(), int64_t{1}}) {
      spec.slice_rows = {rows};
      EXPECT_TRUE(RunChunk(*head, MakeProblem(spec, rng)).done.ok());
    }
    EXPECT_TRUE(head->GradNorm().ok());
    EXPECT_TRUE(head->ApplyStep({.learning_rate = 1e-3}, 1).ok());
  }
  ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  constexpr int64_t kCode = int64_t{32} << 20;
  EXPECT_LE(static_cast<int64_t>(before) - static_cast<int64_t>(after), kCode);
}

TEST(CudaBackend, ChunksInFlightFinishInOrderAndMoreAreRefused) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{256} << 20});
  ASSERT_TRUE(backend.ok()) << backend.status();
  ProblemSpec spec;
  spec.config = {.hidden_size = 512, .vocab_size = 20000, .compute_dtype = DType::kBFloat16};
  spec.hidden_dtype = DType::kBFloat16;
  const Problem problem = MakeProblem(spec, rng);
  const auto head = MakeHead(**backend, problem);
  ASSERT_NE(head, nullptr);
  const int64_t rows = std::min<int64_t>(head->chunk_rows(), 2048);
  const int count = (*backend)->max_chunks_in_flight() + 1;
  std::vector<uint8_t> hidden(static_cast<size_t>(rows * 512 * 2));
  for (uint8_t& byte : hidden) byte = static_cast<uint8_t>(UniformInt(rng, 0, 63));
  std::vector<std::vector<uint8_t>> gradients(static_cast<size_t>(count), hidden);
  const std::vector<int32_t> targets(static_cast<size_t>(rows), 7);
  std::vector<Slice> slices(static_cast<size_t>(count));
  std::vector<Chunk> chunks(static_cast<size_t>(count));
  absl::Mutex mutex;
  std::vector<std::string> events;
  absl::BlockingCounter done(count);
  absl::Notification all_submitted;  // the first chunk is not finished before that
  for (size_t i = 0; i < chunks.size(); ++i) {
    slices[i].rows = rows;
    slices[i].hidden = hidden.data();
    slices[i].grad_hidden = gradients[i].data();
    slices[i].targets = targets.data();
    chunks[i].hidden_dtype = DType::kBFloat16;
    chunks[i].slices = absl::MakeSpan(&slices[i], 1);
    const auto note = [&, i](const char* what, const absl::Status& status) {
      absl::MutexLock lock(&mutex);
      events.push_back(absl::StrCat(what, i, status.ok() ? "" : absl::StatusCodeToString(status.code())));
    };
    head->Submit(&chunks[i], {[note, &all_submitted](absl::Status s) {
                                all_submitted.WaitForNotification();
                                note("results", s);
                              },
                              [note, &done](absl::Status s) {
                                note("done", s);
                                done.DecrementCount();
                              }});
  }
  all_submitted.Notify();
  done.Wait();
  EXPECT_THAT(events, ElementsAre("results0", "done0", "results1", "done1", "results2FAILED_PRECONDITION",
                                  "done2FAILED_PRECONDITION"));
  EXPECT_EQ(gradients[0], gradients[1]);
  EXPECT_TRUE(head->GradNorm().ok());
}

TEST(CudaBackend, SaysWhichNormKernelsAHeadUses) {
  LOSSD_SKIP_WITHOUT_GPU();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{256} << 20});
  ASSERT_TRUE(backend.ok()) << backend.status();
  for (const Norm norm : {Norm::kNone, Norm::kLayerNorm, Norm::kRmsNorm}) {
    HeadConfig config = LargeConfig();
    config.norm = norm;
    const auto head = (*backend)->CreateHead(config);
    ASSERT_TRUE(head.ok()) << head.status();
    std::map<std::string, Choice> choices;
    for (const Choice& choice : (*head)->Describe()) choices[choice.what] = choice;
    EXPECT_EQ(choices.contains("norm"), norm != Norm::kNone);
    EXPECT_EQ(choices.contains("norm gradient"), norm != Norm::kNone);
    if (norm == Norm::kNone) continue;
    EXPECT_EQ(choices["norm"].choice, "rows in registers");
    EXPECT_THAT(choices["norm gradient"].choice, HasSubstr("copies"));
  }
}

// Every way to filtered gradients.
constexpr std::pair<Logits, Gradients> kFiltering[] = {{Logits::kStored, Gradients::kFiltered},
                                                       {Logits::kRecomputed, Gradients::kFiltered}};

TEST(CudaBackend, AFilterWithoutRoomIsGivenUpAndSaysSo) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{256} << 20});
  ASSERT_TRUE(backend.ok()) << backend.status();
  ProblemSpec spec;
  spec.config = {.hidden_size = 24, .vocab_size = 9000, .compute_dtype = DType::kBFloat16};
  spec.slice_rows = {9};
  spec.options.filter_epsilon = 0.0f;  // every class, and a row lists 4096 at most
  for (const auto& [logits, gradients] : kFiltering) {
    spec.config.logits = logits;
    spec.options.gradients = gradients;
    const Problem problem = MakeProblem(spec, rng);
    const auto head = MakeHead(**backend, problem);
    ASSERT_NE(head, nullptr);
    const ChunkRun run = RunChunk(*head, problem);
    EXPECT_EQ(run.gradients, Gradients::kExact);
    ASSERT_FALSE(run.choices.empty());
    EXPECT_EQ(run.choices.front(),
              (Choice{.what = "gradients", .choice = "exact", .reason = "too many candidates"}));
  }
}

TEST(CudaBackend, SaysWhichKernelsAHeadUses) {
  LOSSD_SKIP_WITHOUT_GPU();
  for (FusedLoss fused_loss : {FusedLoss::kWhereFaster, FusedLoss::kNever}) {
    auto backend = CreateCudaBackend({.workspace_bytes = int64_t{1} << 30, .fused_loss = fused_loss});
    ASSERT_TRUE(backend.ok()) << backend.status();
    const auto head = (*backend)->CreateHead(LargeConfig());
    ASSERT_TRUE(head.ok()) << head.status();
    std::map<std::string, Choice> choices;
    for (const Choice& choice : (*head)->Describe()) choices[choice.what] = choice;
    EXPECT_EQ(choices["chunk"].workspace_bytes, (*head)->memory()[MemoryKind::kWorkspace]);
    EXPECT_EQ(choices["gradients"].choice, "exact");
    // The library's products are named, ours are not.
    const bool library = choices["weight gradient"].choice == "library product";
    EXPECT_EQ(choices.contains("weight gradient product"), library);
    EXPECT_EQ(choices.contains("hidden gradient product"), library);
    EXPECT_GT(choices["filtered gradients"].workspace_bytes, 0);
    if (fused_loss == FusedLoss::kNever) {
      EXPECT_EQ(choices["loss"].reason, "switched off");
      EXPECT_THAT(choices["weight gradient product"].choice, HasSubstr("cuBLASLt "));
      EXPECT_THAT(choices["row loss"].choice, HasSubstr("threads a row"));
    }
  }
}

// Of a head in bf16; every row has a target.
ProblemSpec SpecFor(Logits logits, Gradients gradients, int64_t rows, int64_t hidden_size,
                    int64_t vocab_size) {
  ProblemSpec spec;
  spec.config = {.hidden_size = hidden_size,
                 .vocab_size = vocab_size,
                 .compute_dtype = DType::kBFloat16,
                 .logits = logits};
  spec.hidden_dtype = DType::kBFloat16;
  spec.slice_rows = {rows};
  spec.ignored = 0.0;
  spec.options = {.gradients = gradients};
  return spec;
}

// Whoever asks for `filtered` gets it, also where everything is dropped and the target's share of a row is
// lost in the rounding of its sum: for 13,000 classes the share that is dropped rounds to more than 1.
TEST(CudaBackend, FilteredThoughEverythingIsDropped) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  auto backend = CreateCudaBackend({});
  ASSERT_TRUE(backend.ok()) << backend.status();
  for (const auto& [logits, gradients] : kFiltering) {
    for (const int64_t rows : {3, 600}) {  // few and many: candidates of stored logits, and of the logit pass
      ProblemSpec spec = SpecFor(logits, gradients, rows, 24, 13'000);
      spec.options.filter_epsilon = 0x1p-12f;
      Problem problem = MakeProblem(spec, rng);
      std::fill(problem.weight.begin(), problem.weight.end(), 0.0f);
      problem.weight[0] = -10.0f;  // z of class 0, all others have 0
      SliceData& slice = problem.slices.front();
      for (size_t n = 0; n < slice.targets.size(); ++n) {
        slice.hidden[n * 24] = 1.0f;
        slice.targets[n] = 0;
      }
      const auto head = MakeHead(**backend, problem);
      ASSERT_NE(head, nullptr);
      const ChunkRun run = RunChunk(*head, problem);
      EXPECT_EQ(run.gradients, Gradients::kFiltered)
          << Name(logits) << " " << Name(gradients) << " " << rows << " rows: " << run.choices.front().reason;
    }
  }
}

// Many chunks with more candidates than there is room for: most of the later ones do not look for any.
TEST(CudaBackend, RestsFromFilteringInVain) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  constexpr int kChunks = 60;
  for (const auto& [logits, gradients] : kFiltering) {
    SCOPED_TRACE(absl::StrCat(Name(logits), " ", Name(gradients)));
    auto backend = CreateCudaBackend({.workspace_bytes = int64_t{128} << 20});
    ASSERT_TRUE(backend.ok()) << backend.status();
    ProblemSpec spec = SpecFor(logits, gradients, 9, 24, 9000);
    spec.options.filter_epsilon = 1e-9f;
    const Problem flat = MakeProblem(spec, rng);
    const auto head = MakeHead(**backend, flat);
    ASSERT_NE(head, nullptr);
    std::map<std::string, int> reasons;
    for (int i = 0; i < kChunks; ++i) ++reasons[RunChunk(*head, flat).choices.front().reason];
    EXPECT_GE(reasons["too many candidates"], 16);
    EXPECT_GE(reasons["so were the chunks before it"], kChunks / 2);
    EXPECT_EQ(reasons.size(), 2u);
    EXPECT_EQ(RunChunk(*head, flat, {.independent = true}).choices.front().reason, "too many candidates");
  }
}

// Runs the problem as a chunk of its own time and again.
void ExpectSameBits(HeadKernels& head, const Problem& problem, int repeats) {
  SCOPED_TRACE(Describe(problem));
  ChunkRun first;
  std::vector<float> first_gradient;
  for (int i = 0; i < repeats; ++i) {
    ASSERT_TRUE(head.ZeroGradients().ok());
    const ChunkRun run = RunChunk(head, problem, {.independent = true});
    std::vector<float> gradient = ReadGradient(head, Param::kWeight);
    if (i == 0) {
      first = run;
      first_gradient = std::move(gradient);
      continue;
    }
    ASSERT_EQ(run.choices, first.choices);
    ASSERT_EQ(run.slices[0].loss, first.slices[0].loss);
    ASSERT_EQ(run.slices[0].sums.dropped_mass, first.slices[0].sums.dropped_mass);
    ASSERT_EQ(run.slices[0].sums.sampling_variance, first.slices[0].sums.sampling_variance);
    ASSERT_EQ(run.slices[0].grad_hidden, first.slices[0].grad_hidden);
    ASSERT_EQ(gradient, first_gradient);
  }
}

TEST(CudaBackend, LargeChunksGiveTheSameBits) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{256} << 20});
  ASSERT_TRUE(backend.ok()) << backend.status();
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    for (const Gradients gradients :
         {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
      ProblemSpec spec = SpecFor(logits, gradients, 1024, 520, 30'001);
      spec.options.max_gradient_error = 0.02f;
      for (const float deviation : {1.0f, 4.0f}) {
        spec.logit_deviation = deviation;
        const Problem problem = MakeProblem(spec, rng);
        const auto head = MakeHead(**backend, problem);
        ASSERT_NE(head, nullptr);
        ExpectSameBits(*head, problem, 6);
      }
    }
  }
}

// Lists that are filled as the pass goes by about as long as there is room for: what is in them depends on
// which tile was first, what comes out must not.
TEST(CudaBackend, ListsOfThePassGiveTheSameBits) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{256} << 20});
  ASSERT_TRUE(backend.ok()) << backend.status();
  ProblemSpec spec = SpecFor(Logits::kRecomputed, Gradients::kFiltered, 1024, 64, 128'256);
  spec.logit_deviation = 1.0f;
  Problem flat = MakeProblem(spec, rng);
  const auto head = MakeHead(**backend, flat);
  ASSERT_NE(head, nullptr);
  for (const float exponent : {-12.7f, -12.5f, -12.3f, -12.2f, -12.1f}) {
    flat.options.filter_epsilon = std::exp2(exponent);
    EXPECT_EQ(RunChunk(*head, flat, {.independent = true}).gradients, Gradients::kFiltered);
    ExpectSameBits(*head, flat, 12);
  }
}

// Rows held in registers by one warp up to a whole block, and rows too long for that.
TEST(CudaBackend, NormsOfLongRows) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{128} << 20});
  ASSERT_TRUE(backend.ok()) << backend.status();
  constexpr int64_t kShapes[][2] = {{700, 256}, {300, 1024}, {9, 2056}, {5, 8200}, {2, 16384}, {2, 16392}};
  for (Norm norm : {Norm::kLayerNorm, Norm::kRmsNorm}) {
    for (const auto& [rows, hidden] : kShapes) {
      ProblemSpec spec;
      spec.config = {
          .hidden_size = hidden, .vocab_size = 48, .norm = norm, .compute_dtype = DType::kBFloat16};
      spec.hidden_dtype = DType::kBFloat16;
      spec.slice_rows = {rows};
      spec.accumulate_mask = true;
      RunAndCompare(**backend, {MakeProblem(spec, rng)});
    }
  }
}

// The selection reads rows up to 65,536 16-bit logits in blocks of another size than longer ones.
TEST(CudaBackend, FiltersShortAndLongRows) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{64} << 20});
  ASSERT_TRUE(backend.ok()) << backend.status();
  for (int64_t vocab : {8192, 32064, 65536, 65537, 100'001}) {
    ProblemSpec spec;
    spec.config = {.hidden_size = 16, .vocab_size = vocab, .compute_dtype = DType::kBFloat16};
    spec.options.gradients = Gradients::kFiltered;
    spec.hidden_dtype = DType::kBFloat16;
    spec.slice_rows = {9, 4};
    spec.logit_deviation = 8.0f;  // few enough candidates for the pool
    RunAndCompare(**backend, {MakeProblem(spec, rng)});
  }
}

TEST(CudaBackend, SeveralHeadsShareTheDevice) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{32} << 20});
  ASSERT_TRUE(backend.ok()) << backend.status();
  for (int i = 0; i < 3; ++i) {
    const Problem first = MakeProblem(RandomSpec(40, 24, 61, DType::kBFloat16, DType::kFloat32, rng), rng);
    const auto other = MakeHead(**backend, first);
    ASSERT_NE(other, nullptr);
    RunAndCompare(**backend,
                  {MakeProblem(RandomSpec(30, 40, 99, DType::kFloat32, DType::kBFloat16, rng), rng)});
  }
}

// ---- gradients of entropies ----
//
// As the entropy bonus of reinforcement learning has them, in chunks as large as those for which a backend
// fuses losses on its own accord.

struct Case {
  Logits logits;
  Gradients gradients;
  float softcap;
};

constexpr Case kCases[] = {
    {Logits::kStored, Gradients::kExact, 0.0f},      {Logits::kStored, Gradients::kExact, 30.0f},
    {Logits::kStored, Gradients::kFiltered, 0.0f},   {Logits::kStored, Gradients::kSampled, 0.0f},
    {Logits::kStored, Gradients::kSampled, 30.0f},   {Logits::kRecomputed, Gradients::kExact, 0.0f},
    {Logits::kRecomputed, Gradients::kExact, 30.0f}, {Logits::kRecomputed, Gradients::kSampled, 30.0f},
};

ProblemSpec SpecOf(const Case& c) {
  ProblemSpec spec;
  spec.config = {.hidden_size = 520,
                 .vocab_size = 30'001,
                 .compute_dtype = DType::kBFloat16,
                 .optimizer_state = OptimizerState::kNone,
                 .logits = c.logits};
  spec.hidden_dtype = DType::kBFloat16;
  spec.slice_rows = {1024};
  spec.ignored = 0.0;
  spec.options = {.softcap = c.softcap, .gradients = c.gradients};
  spec.grad_loss = spec.grad_lse = spec.grad_entropy = true;
  return spec;
}

std::map<std::string, Choice> ChoicesOf(const ChunkRun& run) {
  std::map<std::string, Choice> choices;
  for (const Choice& choice : run.choices) choices[choice.what] = choice;
  return choices;
}

class CudaEntropy : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    LOSSD_SKIP_WITHOUT_HOPPER_GPU();
    auto backend = CreateCudaBackend({.workspace_bytes = int64_t{256} << 20});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    Rng rng = FreshRng();
    problem_ = MakeProblem(SpecOf(GetParam()), rng);
    head_ = MakeHead(*backend_, problem_);
    ASSERT_NE(head_, nullptr);
  }

  std::unique_ptr<Backend> backend_;
  Problem problem_;
  std::unique_ptr<HeadKernels> head_;
};

TEST_P(CudaEntropy, IsInTheLogitsProduct) {
  const Case& c = GetParam();
  const auto choices = ChoicesOf(RunChunk(*head_, problem_));
  const bool exact = c.gradients == Gradients::kFiltered;  // the entropy's gradient cannot be filtered
  EXPECT_EQ(choices.at("gradients").choice, Name(exact ? Gradients::kExact : c.gradients));
  EXPECT_EQ(choices.at("loss").choice, "in the logits product") << choices.at("loss").reason;
  EXPECT_EQ(choices.at("weight gradient").choice,
            c.logits == Logits::kStored ? "own product" : "library product");
}

TEST_P(CudaEntropy, GivesTheSameBits) {
  const ChunkRun first = RunChunk(*head_, problem_, {.independent = true});
  const std::vector<float> gradient = ReadGradient(*head_, Param::kWeight);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(head_->ZeroGradients().ok());
    const ChunkRun run = RunChunk(*head_, problem_, {.independent = true});
    ASSERT_EQ(run.slices[0].entropy, first.slices[0].entropy);
    ASSERT_EQ(run.slices[0].grad_hidden, first.slices[0].grad_hidden);
    ASSERT_EQ(ReadGradient(*head_, Param::kWeight), gradient);
  }
}

std::string CaseName(const ::testing::TestParamInfo<Case>& test) {
  const Case& c = test.param;
  return std::string(Name(c.logits)) + "_" + std::string(Name(c.gradients)) +
         (c.softcap > 0.0f ? "_capped" : "");
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaEntropy, ::testing::ValuesIn(kCases), CaseName);

// ---- priorities of streams ----
//
// Whichever work goes first on the GPU, a chunk's results are the same bits: dL/dW on a stream of its own
// comes after what it reads and before what overwrites that.

constexpr int kChunks = 8;

struct Outcome {
  std::vector<std::vector<float>> hidden;  // of each chunk
  std::vector<float> weight;
  double norm = 0.0;
};

Outcome Train(StreamPriority priority, const std::vector<Problem>& problems) {
  Outcome outcome;
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{256} << 20, .stream_priority = priority});
  EXPECT_TRUE(backend.ok()) << backend.status();
  if (!backend.ok()) return outcome;
  const auto head = MakeHead(**backend, problems.front());
  for (const Problem& problem : problems) {
    const ChunkRun run = RunChunk(*head, problem);
    EXPECT_TRUE(run.done.ok()) << run.done;
    for (const SliceOutputs& slice : run.slices) outcome.hidden.push_back(slice.grad_hidden);
  }
  const auto norm = head->GradNorm();
  EXPECT_TRUE(norm.ok()) << norm.status();
  outcome.norm = norm.value_or(0.0);
  outcome.weight = ReadGradient(*head, Param::kWeight);
  return outcome;
}

TEST(StreamPriority, ResultsAreTheSameBits) {
  LOSSD_SKIP_WITHOUT_GPU();
  Rng rng = FreshRng();
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    for (const Gradients gradients : {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled}) {
      SCOPED_TRACE(absl::StrCat(Name(logits), " logits, ", Name(gradients), " gradients"));
      ProblemSpec spec;
      spec.config = {
          .hidden_size = 512, .vocab_size = 16001, .compute_dtype = DType::kBFloat16, .logits = logits};
      spec.hidden_dtype = DType::kBFloat16;
      spec.slice_rows = {700, 324};
      spec.options = {.gradients = gradients};
      std::vector<Problem> problems;
      for (int i = 0; i < kChunks; ++i) problems.push_back(MakeProblem(spec, rng));
      const Outcome expected = Train(StreamPriority::kNone, problems);
      ASSERT_FALSE(expected.weight.empty());
      for (const StreamPriority priority : {StreamPriority::kHiddenGradients, StreamPriority::kAll}) {
        const Outcome outcome = Train(priority, problems);
        EXPECT_EQ(outcome.norm, expected.norm);
        EXPECT_TRUE(outcome.weight == expected.weight);
        EXPECT_TRUE(outcome.hidden == expected.hidden);
      }
    }
  }
}

}  // namespace
}  // namespace lossd::kernels::testing::cuda_backend_test
