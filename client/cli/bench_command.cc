// SPDX-License-Identifier: Apache-2.0
// The command bench.
#include <atomic>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cli/bench_report.h"
#include "client/cli/commands.h"
#include "client/cli/format.h"
#include "client/cli/live.h"
#include "client/cli/options.h"
#include "client/cli/random_rows.h"
#include "client/cli/value_checks.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {
namespace {

enum class What { kLoss, kDx, kAll };

const std::map<std::string, What>& Whats() {
  static const auto* words =
      new std::map<std::string, What>{{"loss", What::kLoss}, {"dx", What::kDx}, {"all", What::kAll}};
  return *words;
}

enum class Data { kRandom, kReal };

const std::map<std::string, Data>& DataKinds() {
  static const auto* words =
      new std::map<std::string, Data>{{"random", Data::kRandom}, {"real", Data::kReal}};
  return *words;
}

const std::map<std::string, std::string>& Transports() {
  static const auto* words = new std::map<std::string, std::string>{
      {"auto", "auto"}, {"cuda_ipc", "cuda_ipc"}, {"grpc", "grpc"}, {"shared_memory", "shared_memory"}};
  return *words;
}

struct BenchFlags {
  std::string head;
  Data data = Data::kRandom;
  bool overwrite_weight = false;
  What what = What::kAll;
  uint64_t rows = 4096;
  v1::DType dtype = v1::DTYPE_BF16;
  int in_flight = 1;
  double seconds = 10;
  uint64_t microbatches = 0;  // 0: by time
  uint64_t warmup = 2;
  uint64_t seed = 0;
  bool force = false;
  client::ClientOptions connection;
  std::optional<uint64_t> shared_memory_bytes;
  std::optional<int> gpu;  // that has the rows, by the driver's number; nullopt: the server's
  client::ComputeOptions loss;
};

// Sends microbatches from `in_flight` threads, each waiting for its own, and adds up what they took. Hidden
// states and gradients are on a GPU, or on the host (nullopt).
class Bench {
 public:
  Bench(const BenchFlags& flags, const HiddenRows& rows, RowBuffer hidden, std::optional<int> gpu,
        const v1::HeadDescription& head, client::Client* client)
      : flags_(flags),
        rows_(rows),
        hidden_(std::move(hidden)),
        gpu_(gpu),
        step_(head.state().step()),
        client_(client) {
    // A deterministic server wants ids from 0; otherwise away from those of other runs in the same step.
    if (head.slice_limits().row_grid() == 0) first_id_ = uint64_t{std::random_device()()} << 32;
  }

  absl::StatusOr<BenchTotals> Run() {
    for (uint64_t i = 0; i < flags_.warmup; ++i) {
      absl::StatusOr<RowBuffer> dx = MakeGradient();
      if (!dx.ok()) return dx.status();
      const absl::StatusOr<client::LossResult> result = ComputeOne(*dx);
      if (!result.ok()) return result.status();
    }
    start_ = clocks::SteadyNow();
    started_ = 0;
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(flags_.in_flight));
    for (int i = 0; i < flags_.in_flight; ++i) threads.emplace_back([this] { Work(); });
    ShowProgress();
    for (std::thread& thread : threads) thread.join();
    absl::MutexLock lock(&mu_);
    totals_.seconds = absl::ToDoubleSeconds(last_end_ - start_);
    if (!error_.ok()) return error_;
    return totals_;
  }

 private:
  absl::StatusOr<RowBuffer> MakeGradient() const {
    return RowBuffer::Create(flags_.what == What::kLoss ? 0 : rows_.hidden.size(), gpu_);
  }

  absl::StatusOr<client::LossResult> ComputeOne(RowBuffer& dx) {
    client::Microbatch microbatch;
    microbatch.head = flags_.head;
    if (flags_.what == What::kAll) microbatch.step = step_;
    microbatch.id = first_id_ + next_id_++;
    microbatch.hidden_size = rows_.hidden_size;
    microbatch.hidden_dtype = rows_.dtype;
    microbatch.hidden = hidden_.data();
    microbatch.memory = hidden_.memory();
    microbatch.targets = rows_.targets;
    client::LossOutputs outputs;
    if (flags_.what != What::kLoss) outputs.grad_hidden = dx.data();
    client::ComputeOptions options = flags_.loss;
    options.accumulate_gradients = flags_.what == What::kAll;
    return client_->ComputeLoss(microbatch, outputs, options);
  }

  bool Over() {
    if (interrupt_.received()) return true;
    {
      absl::MutexLock lock(&mu_);
      if (!error_.ok()) return true;
    }
    if (flags_.microbatches > 0) return started_++ >= flags_.microbatches;
    return clocks::SteadyNow() - start_ >= absl::Seconds(flags_.seconds);
  }

  void Work() {
    absl::StatusOr<RowBuffer> dx = MakeGradient();
    if (!dx.ok()) Record(dx.status());
    while (!Over()) Record(ComputeOne(*dx));
    absl::MutexLock lock(&mu_);
    ++ended_;
  }

  void Record(const absl::StatusOr<client::LossResult>& result) {
    absl::MutexLock lock(&mu_);
    if (!result.ok()) {
      error_.Update(result.status());
      return;
    }
    last_end_ = clocks::SteadyNow();
    totals_.rows += rows_.rows;
    totals_.sent_bytes += result->sent_bytes;
    totals_.received_bytes += result->received_bytes;
    totals_.repeats += result->repeats;
    totals_.streams = result->streams;
    totals_.queue_seconds += result->queue_seconds;
    totals_.compute_seconds += result->compute_seconds;
    totals_.sampling_variance += result->sampling_variance;
    totals_.squared_gradient += result->squared_gradient;
    totals_.latencies.push_back(result->wall_seconds);
  }

  // Until the threads have ended.
  void ShowProgress() {
    if (!ShowsProgress()) return;
    auto all_ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return ended_ == flags_.in_flight; };
    absl::MutexLock lock(&mu_);
    while (!clocks::AwaitFor(mu_, absl::Condition(&all_ended), absl::Milliseconds(500))) {
      const double seconds = absl::ToDoubleSeconds(clocks::SteadyNow() - start_);
      std::fprintf(stderr, "\r\033[K%5.1f s  %s microbatches  %s rows/s", seconds,
                   HumanCount(totals_.latencies.size()).c_str(),
                   HumanRate(static_cast<double>(totals_.rows) / seconds).c_str());
    }
    std::fputs("\r\033[K", stderr);
  }

  const BenchFlags& flags_;
  const HiddenRows& rows_;
  RowBuffer hidden_;  // the same for all threads, which read it
  const std::optional<int> gpu_;
  const uint64_t step_;
  client::Client* const client_;
  uint64_t first_id_ = 0;
  Interrupt interrupt_;
  absl::Time start_;
  std::atomic<uint64_t> next_id_{0};
  std::atomic<uint64_t> started_{0};

  absl::Mutex mu_;
  BenchTotals totals_ ABSL_GUARDED_BY(mu_);
  absl::Time last_end_ ABSL_GUARDED_BY(mu_) = clocks::SteadyNow();
  absl::Status error_ ABSL_GUARDED_BY(mu_);
  int ended_ ABSL_GUARDED_BY(mu_) = 0;
};

absl::Status CheckHead(const BenchFlags& flags, const v1::HeadDescription& head) {
  if (flags.what != What::kAll || flags.force || head.step_rows() == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "head \"", flags.head, "\" holds gradients of ", head.step_rows(),
      " rows, which the benchmark would mix with its own and discard; use --what dx, or --force"));
}

// Real rows need the weight that belongs to them, which replaces the head's.
absl::StatusOr<HiddenRows> MakeBenchRows(const BenchFlags& flags, const v1::HeadSpec& spec,
                                         client::Client& client) {
  if (flags.data == Data::kRandom) {
    return RandomRows(flags.rows, spec.hidden_size(), spec.vocab_size(), flags.dtype, flags.seed);
  }
  if (!flags.overwrite_weight) {
    return absl::InvalidArgumentError(absl::StrCat("--data real replaces the weight of head \"", flags.head,
                                                   "\"; say so with --overwrite-weight"));
  }
  if (absl::Status status = CheckTakesRealRows(spec); !status.ok()) return status;
  const auto real =
      data::RealRows::Create(static_cast<int64_t>(flags.rows), static_cast<int64_t>(spec.hidden_size()),
                             static_cast<int64_t>(spec.vocab_size()), flags.seed);
  if (!real.ok()) return real.status();
  if (absl::Status status = WriteRealWeight(*real, flags.head, client); !status.ok()) return status;
  return MakeRealRows(*real, flags.dtype);
}

BenchSetup SetupOf(const BenchFlags& flags, const HiddenRows& rows,
                   const client::ConnectionChoice& connections) {
  return {flags.head,
          NameOf(DataKinds(), flags.data),
          NameOf(Whats(), flags.what),
          NameOf(DTypes(), rows.dtype),
          rows.hidden_size,
          rows.rows,
          flags.in_flight,
          connections.connections,
          flags.loss.slice_bytes};
}

client::ClientOptions OptionsOf(const BenchFlags& flags) {
  client::ClientOptions options = flags.connection;
  if (flags.shared_memory_bytes.has_value())
    options.shared_memory_bytes = static_cast<int64_t>(*flags.shared_memory_bytes);
  return options;
}

// Where rows are to be: on the GPU that was named; else with CUDA IPC on the server's first one that this
// process sees, and with other transports on the host (nullopt).
absl::StatusOr<std::optional<int>> PlaceOfRows(const BenchFlags& flags, client::Client& client,
                                               absl::Duration timeout) {
  if (flags.gpu.has_value()) {
    if (absl::Status status = CheckGpu("--gpu", *flags.gpu); !status.ok()) return status;
    return flags.gpu;
  }
  if (flags.connection.transport != "cuda_ipc") return std::nullopt;
  const absl::StatusOr<v1::ServerDescription> server = client.GetServer(timeout);
  if (!server.ok()) return server.status();
  absl::StatusOr<int> gpu = FindGpu(server->region_device());
  for (int i = 1; !gpu.ok() && i < server->region_devices_size(); ++i) {
    const absl::StatusOr<int> next = FindGpu(server->region_devices(i));
    if (next.ok()) gpu = next;
  }
  if (!gpu.ok()) return gpu.status();
  return *gpu;
}

absl::Status RunBench(Context* context, const BenchFlags& flags) {
  const absl::StatusOr<std::unique_ptr<client::Client>> client = context->Connect(OptionsOf(flags));
  if (!client.ok()) return client.status();
  const absl::StatusOr<v1::HeadDescription> head = (*client)->DescribeHead(flags.head, context->timeout());
  if (!head.ok()) return head.status();
  if (absl::Status status = CheckHead(flags, *head); !status.ok()) return status;
  // The rows, and a gradient for each thread.
  const int copies = flags.what == What::kLoss ? 1 : 1 + flags.in_flight;
  absl::Status room = CheckRoom("--rows", flags.rows, head->spec().hidden_size(), flags.dtype, copies);
  if (!room.ok()) return room;
  const absl::StatusOr<HiddenRows> rows = MakeBenchRows(flags, head->spec(), **client);
  if (!rows.ok()) return rows.status();

  const absl::StatusOr<std::optional<int>> gpu = PlaceOfRows(flags, **client, context->timeout());
  if (!gpu.ok()) return gpu.status();
  absl::StatusOr<RowBuffer> hidden = RowBuffer::Copy(rows->hidden, *gpu);
  if (!hidden.ok()) return hidden.status();

  const absl::StatusOr<BenchTotals> totals =
      Bench(flags, *rows, *std::move(hidden), *gpu, *head, client->get()).Run();
  if (flags.what == What::kAll) {
    const auto zeroed = (*client)->ZeroGradients(flags.head, head->state().step(), context->timeout());
    if (totals.ok() && !zeroed.ok()) return zeroed.status();
  }
  if (!totals.ok()) return totals.status();
  const client::TransportChoice choice = (*client)->transport();
  BenchSetup setup = SetupOf(flags, *rows, choice.connections);
  setup.channels_reason = choice.connections.reason;
  setup.transport = gpu->has_value() ? choice.device.transport : choice.transport;
  setup.gpu = *gpu;
  setup.transport_reason = gpu->has_value() ? choice.device.reason : choice.reason;
  if (context->json) {
    context->PrintJson(BenchJson(setup, *totals));
  } else {
    context->Print(BenchText(setup, *totals));
  }
  return absl::OkStatus();
}

}  // namespace

void AddBenchCommand(CLI::App* app, Context* context) {
  CLI::App* bench = app->add_subcommand("bench", "Measure throughput and latency with made-up rows");
  auto flags = std::make_shared<BenchFlags>();
  AddHead(bench, &flags->head);
  AddWord(bench, "--what", &flags->what, Whats(),
          "loss only, with dL/dx, or all: also accumulate dL/dW, discarded afterwards [all]");
  AddWord(bench, "--data", &flags->data, DataKinds(),
          "Rows: random, or real, with the softmax of a trained model (needs --overwrite-weight) [random]");
  bench->add_flag("--overwrite-weight", flags->overwrite_weight,
                  "Replace the head's weight by the one that real rows need");
  bench->add_option("--rows", flags->rows, "Rows per microbatch [4096]")->check(WholeNumber(1));
  AddWord(bench, "--dtype", &flags->dtype, DTypes(), "Element type to transfer [bf16]");
  bench
      ->add_option("--in-flight", flags->in_flight,
                   "Microbatches under way at once, 1 to 1024; 1: closed loop [1]")
      ->check(WholeNumber(1, 1024));
  bench->add_option("--channels", flags->connection.channels, "Connections, 1 to 64 [as many as help]")
      ->check(WholeNumber(1, 64));
  AddWord(bench, "--transport", &flags->connection.transport, Transports(),
          "How rows travel: auto takes memory of the server's GPUs for rows that are on one of them (--gpu), "
          "and shared memory if the server is on this host; cuda_ipc has the rows on the server's GPU, and "
          "takes memory of that [auto]");
  bench
      ->add_option("--gpu", flags->gpu,
                   "The GPU that has the rows, by its number [none; with cuda_ipc the server's first]")
      ->check(WholeNumber(0, 1023));
  AddBytes(bench, "--shared-memory-bytes", &flags->shared_memory_bytes,
           "Memory to share with the server; it may give less [what the calls need, up to 256MiB]");
  CLI::Option* seconds =
      bench->add_option("--seconds", flags->seconds, "Run for so long [10]")->check(NumberAboveZero());
  bench->add_option("--microbatches", flags->microbatches, "Run for so many instead")
      ->check(WholeNumber(1))
      ->excludes(seconds);
  bench->add_option("--warmup", flags->warmup, "Microbatches before the clock starts [2]");
  bench->add_option("--seed", flags->seed, "Of the rows [0]");
  bench->add_flag("--force", flags->force, "Even if the open step holds gradients");
  AddLossOptions(bench, &flags->loss);
  bench->callback([=] { context->action = [=] { return RunBench(context, *flags); }; });
}

}  // namespace lossd::cli
