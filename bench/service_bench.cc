// SPDX-License-Identifier: Apache-2.0
// Measures the cost of the service: rows per second of the same loss computation by the kernels alone, by the
// engine, and by a client over TCP loopback. The three run one after the other in one process, each on a
// backend of its own with the same options.
//
//   server_bench service --rows=1024 --hidden_size=512 --vocab_size=32000 --seconds=5
//
//   server_bench service --target=127.0.0.1:7070
//
// The second command measures only the client, of a server that is already running.
//
// Prints a table, and writes JSON to --json=FILE. Each of the three computes loss, dL/dx and dL/dW of the
// same random rows.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "bench/command.h"
#include "bench/server_bench.h"
#include "client/cpp/client.h"
#include "kernels/backend.h"
#include "kernels/clocks/clock.h"
#include "kernels/create_backend.h"
#include "nlohmann/json.hpp"
#include "server/app/server.h"
#include "server/engine/engine.h"

namespace lossd::bench::service {
namespace {

struct Flags : CommandFlags {
  Flag<int64_t> rows{this, "rows", 1024, "rows of a microbatch"};
  Flag<int64_t> hidden_size{this, "hidden_size", 512, "D"};
  Flag<int64_t> vocab_size{this, "vocab_size", 32000, "V"};
  Flag<std::string> backend{this, "backend", "auto", "auto, cpu or cuda"};
  Flag<std::string> devices{this, "devices", "", "several GPUs, e.g. 0,1 or all"};
  Flag<int> threads{this, "threads", 0, "threads of the CPU backend; 0: all the process may use"};
  Flag<int> cpu_devices{this, "cpu_devices", 1, "devices of the CPU backend, which share its threads"};
  Flag<std::string> split{this, "split", "any", "what several devices divide: rows, vocabulary, or any"};
  Flag<int> in_flight{this, "in_flight", 4, "microbatches under way at once, for the engine and the client"};
  Flag<std::vector<std::string>> channels{this, "channels", {"1", "2", "4"}, "connections to try"};
  Flag<int64_t> slice_bytes{this, "slice_bytes", 0,
                            "hidden states that the client sends at once; 0: as it chooses"};
  Flag<std::string> target{this, "target", "",
                           "measure a client of this server, host:port, and nothing else"};
  Flag<double> seconds{this, "seconds", 5.0, "measured time of each line, after a second of warm-up"};
  Flag<std::string> json{this, "json", "", "also write the results to this file"};
} flags;

constexpr char kHead[] = "bench";
constexpr double kWarmUpSeconds = 1.0;

// Ends the program on an error, because a benchmark measures nothing after an error.
template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) {
    std::cerr << value.status() << "\n";
    std::exit(1);
  }
  return *std::move(value);
}
void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << status << "\n";
  std::exit(1);
}

struct Shape {
  int64_t rows, hidden_size, vocab_size;
};

// Random bf16 hidden states and targets, in staging memory, from which the device copies fast.
class Rows {
 public:
  Rows(const Shape& shape, kernels::Backend& backend)
      : memory_(Must(backend.AllocateStaging(2 * shape.rows * shape.hidden_size))) {
    std::mt19937_64 rng(1);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < shape.rows * shape.hidden_size; ++i) {
      const float value = normal(rng);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      hidden()[i] = static_cast<uint16_t>(bits >> 16);
    }
    std::uniform_int_distribution<int32_t> target(0, static_cast<int32_t>(shape.vocab_size - 1));
    for (int64_t i = 0; i < shape.rows; ++i) targets_.push_back(target(rng));
  }
  uint16_t* hidden() const { return reinterpret_cast<uint16_t*>(memory_->bytes().data()); }  // bf16 [N, D]
  const std::vector<int32_t>& targets() const { return targets_; }                           // [N]

 private:
  const std::unique_ptr<kernels::StagingMemory> memory_;
  std::vector<int32_t> targets_;
};

struct Line {
  std::string name;
  double rows_per_second = 0.0;
  double microbatch_seconds = 0.0;  // the mean, from submission to result
};

// Calls `once` again and again until `seconds` have passed after the warm-up. Each call computes `rows` rows.
template <typename Fn>
Line Measure(std::string name, int64_t rows, double seconds, Fn once) {
  const auto run = [&](double limit) {
    int64_t calls = 0;
    const absl::Time start = clocks::SteadyNow();
    double elapsed = 0.0;
    do {
      once();
      ++calls;
      elapsed = absl::ToDoubleSeconds(clocks::SteadyNow() - start);
    } while (elapsed < limit);
    return elapsed / static_cast<double>(calls);
  };
  run(kWarmUpSeconds);
  const double per_call = run(seconds);
  return {std::move(name), static_cast<double>(rows) / per_call, per_call};
}

std::unique_ptr<kernels::Backend> MakeBackend() {
  return Must(kernels::CreateBackend({.backend = *flags.backend,
                                      .devices = *flags.devices,
                                      .threads = *flags.threads,
                                      .cpu_devices = *flags.cpu_devices,
                                      .split = *flags.split}))
      .backend;
}

kernels::HeadConfig ConfigFor(const Shape& shape, const kernels::Backend& backend) {
  kernels::HeadConfig config{.hidden_size = shape.hidden_size, .vocab_size = shape.vocab_size};
  if (backend.info().name != "cpu") config.compute_dtype = kernels::DType::kBFloat16;
  return config;
}

// A chunk that the kernels compute.
struct Flight {
  std::vector<kernels::Slice> slices;
  kernels::Chunk chunk;
  absl::Notification done;
};

// Measures the kernels alone, with chunks as large as the head allows and as many in flight as the backend
// takes.
Line MeasureKernels(const Shape& shape, double seconds) {
  const auto backend = MakeBackend();
  auto head = Must(backend->CreateHead(ConfigFor(shape, *backend)));
  const Rows rows(shape, *backend);
  const auto grad = Must(backend->AllocateStaging(2 * shape.rows * shape.hidden_size));
  std::deque<std::unique_ptr<Flight>> under_way;
  const auto submit = [&](int64_t begin) {
    auto flight = std::make_unique<Flight>();
    const int64_t end = std::min(shape.rows, begin + head->chunk_rows());
    const int64_t devices = head->chunk_rows() / head->slice_rows();  // one slice for each device
    const int64_t slice_rows = (end - begin + devices - 1) / devices;
    for (int64_t first = begin; first < end; first += slice_rows) {
      kernels::Slice slice;
      slice.rows = std::min(slice_rows, end - first);
      slice.hidden = rows.hidden() + first * shape.hidden_size;
      slice.targets = rows.targets().data() + first;
      slice.grad_hidden = grad->bytes().data() + 2 * first * shape.hidden_size;
      flight->slices.push_back(slice);
    }
    flight->chunk.slices = absl::MakeSpan(flight->slices);
    head->Submit(&flight->chunk, {.on_results = [](absl::Status status) { Must(status); },
                                  .on_done =
                                      [done = &flight->done](absl::Status status) {
                                        Must(status);
                                        done->Notify();
                                      }});
    under_way.push_back(std::move(flight));
  };
  const auto wait_for_one = [&] {
    under_way.front()->done.WaitForNotification();
    under_way.pop_front();
  };
  Line line = Measure("kernels", shape.rows, seconds, [&] {
    for (int64_t begin = 0; begin < shape.rows; begin += head->chunk_rows()) {
      if (static_cast<int>(under_way.size()) >= backend->max_chunks_in_flight()) wait_for_one();
      submit(begin);
    }
  });
  while (!under_way.empty()) wait_for_one();
  return line;
}

// Waits for the end of a stream, and drops its results. If a slice had to wait for memory, the slice is
// copied on the thread that brings the memory.
class Waiter : public engine::StreamObserver {
 public:
  void OnMemory(absl::AnyInvocable<void()> receive) override { receive(); }
  void OnSlice(engine::SliceOutput) override {}
  void OnFinished(absl::Status status, const engine::StreamSummary&) override {
    Must(status);
    done_.Notify();
  }
  void Wait() { done_.WaitForNotification(); }

 private:
  absl::Notification done_;
};

// Measures the engine. Slices are copied into staging buffers, as the rpc layer does.
Line MeasureEngine(const Shape& shape, double seconds) {
  const auto backend = MakeBackend();
  const Rows rows(shape, *backend);
  auto engine = Must(engine::Engine::Create({}, backend.get(), 1, {}));
  Must(engine->CreateHead(kHead, ConfigFor(shape, *backend)));
  Must(engine->PublishHead(kHead));
  const auto limits = Must(engine->Describe(kHead)).limits;
  const int64_t row_bytes = shape.hidden_size * 2;
  const int64_t slice_rows = std::min(limits.max_rows, std::max<int64_t>(1, limits.max_bytes / row_bytes));
  uint64_t id = 0;
  const auto start_one = [&] {
    engine::StreamSpec spec;
    spec.head = kHead;
    spec.microbatch_id = id++;
    spec.microbatch_rows = shape.rows;
    spec.rows = {0, shape.rows};
    spec.want_grad_hidden = true;
    spec.accumulate_gradients = true;
    spec.step = 0;
    spec.targets = rows.targets();
    auto waiter = std::make_shared<Waiter>();
    auto stream = Must(engine->Open(std::move(spec), waiter));
    stream->Start();
    for (int64_t begin = 0; begin < shape.rows; begin += slice_rows) {
      const engine::RowRange range{begin, std::min(shape.rows, begin + slice_rows)};
      absl::Notification queued;
      stream->Receive({.rows = range,
                       .bytes = range.size() * row_bytes,
                       .copy =
                           [&](uint8_t* to) {
                             std::memcpy(to, rows.hidden() + begin * shape.hidden_size,
                                         static_cast<size_t>(range.size() * row_bytes));
                           },
                       .on_queued = [&](int64_t) { queued.Notify(); }});
      queued.WaitForNotification();
    }
    return std::make_pair(std::move(stream), waiter);
  };
  std::deque<decltype(start_one())> under_way;
  Line line = Measure("engine", shape.rows, seconds, [&] {
    while (static_cast<int>(under_way.size()) < *flags.in_flight) under_way.push_back(start_one());
    under_way.front().second->Wait();
    under_way.pop_front();
  });
  while (!under_way.empty()) {
    under_way.front().second->Wait();
    under_way.pop_front();
  }
  return line;
}

std::unique_ptr<app::Server> StartServer() {
  return Must(app::Server::Start({.listen = "127.0.0.1:0",
                                  .http = "",
                                  .backend = *flags.backend,
                                  .devices = *flags.devices,
                                  .threads = *flags.threads,
                                  .cpu_devices = *flags.cpu_devices,
                                  .split = *flags.split}));
}

// Measures a client over TCP. Its server is in this process, or is the server that --target names.
Line MeasureService(const Shape& shape, int channels, double seconds) {
  const auto cpu = Must(kernels::CreateBackend({.backend = "cpu"})).backend;
  const Rows rows(shape, *cpu);  // plain memory, as a trainer has it
  const std::string given = *flags.target;
  const auto server = given.empty() ? StartServer() : nullptr;
  const std::string target = given.empty() ? server->grpc_address() : given;
  auto client = Must(client::Client::Connect({.target = target, .channels = channels}));
  v1::CreateHeadRequest request;
  request.mutable_spec()->set_name(kHead);
  request.mutable_spec()->set_hidden_size(static_cast<uint64_t>(shape.hidden_size));
  request.mutable_spec()->set_vocab_size(static_cast<uint64_t>(shape.vocab_size));
  Must(client->CreateHead(request));
  const size_t in_flight = static_cast<size_t>(*flags.in_flight);
  std::vector<std::vector<uint16_t>> grads(
      in_flight, std::vector<uint16_t>(static_cast<size_t>(shape.rows * shape.hidden_size)));
  uint64_t id = 0;
  const auto start_one = [&] {
    const client::Microbatch microbatch{.head = kHead,
                                        .step = 0,
                                        .id = id,
                                        .hidden_size = static_cast<uint64_t>(shape.hidden_size),
                                        .hidden_dtype = v1::DTYPE_BF16,
                                        .hidden = rows.hidden(),
                                        .targets = rows.targets()};
    client::ComputeOptions options;
    options.accumulate_gradients = true;
    if (const int64_t bytes = *flags.slice_bytes; bytes > 0)
      options.slice_bytes = static_cast<uint64_t>(bytes);
    return client->ComputeLossAsync(microbatch, {.grad_hidden = grads[id++ % in_flight].data()}, options);
  };
  std::deque<client::PendingLoss> under_way;
  Line line = Measure(absl::StrCat("service, ", channels, channels == 1 ? " channel" : " channels"),
                      shape.rows, seconds, [&] {
                        while (under_way.size() < in_flight) under_way.push_back(start_one());
                        Must(under_way.front().Wait());
                        under_way.pop_front();
                      });
  for (client::PendingLoss& pending : under_way) Must(pending.Wait());
  Must(client->DeleteHead(kHead));
  return line;
}

void Print(const Shape& shape, const std::vector<Line>& lines) {
  std::cout << absl::StrFormat("N = %d, D = %d, V = %d, bf16 hidden states, loss + dx + dW\n", shape.rows,
                               shape.hidden_size, shape.vocab_size);
  std::cout << absl::StrFormat("%-22s %12s %14s %12s %10s\n", "", "rows/s", "ms/microbatch", "MB/s each way",
                               "of kernels");
  for (const Line& line : lines) {
    std::cout << absl::StrFormat("%-22s %12.1f %14.2f %12.1f %9.1f%%\n", line.name, line.rows_per_second,
                                 1e3 * line.microbatch_seconds,
                                 line.rows_per_second * static_cast<double>(shape.hidden_size) * 2 / 1e6,
                                 100.0 * line.rows_per_second / lines.front().rows_per_second);
  }
}

void WriteJson(const std::string& path, const Shape& shape, const std::vector<Line>& lines) {
  nlohmann::json json = {
      {"rows", shape.rows}, {"hidden_size", shape.hidden_size}, {"vocab_size", shape.vocab_size}};
  for (const Line& line : lines) {
    json["results"].push_back({{"name", line.name},
                               {"rows_per_second", line.rows_per_second},
                               {"seconds_per_microbatch", line.microbatch_seconds}});
  }
  std::ofstream file(path);
  file << json.dump(2) << "\n";
  if (!file.good()) Must(absl::UnavailableError(absl::StrCat("cannot write ", path)));
}

int Main() {
  const Shape shape{*flags.rows, *flags.hidden_size, *flags.vocab_size};
  const double seconds = *flags.seconds;
  std::vector<Line> lines;
  if (flags.target->empty()) {
    lines = {MeasureKernels(shape, seconds), MeasureEngine(shape, seconds)};
  }
  for (const std::string& text : *flags.channels) {
    lines.push_back(MeasureService(shape, std::atoi(text.c_str()), seconds));
  }
  Print(shape, lines);
  if (const std::string path = *flags.json; !path.empty()) WriteJson(path, shape, lines);
  return 0;
}

}  // namespace
}  // namespace lossd::bench::service

namespace lossd::bench {

int RunServiceBench(int argc, char** argv) {
  service::flags.Parse(argc, argv);
  return service::Main();
}

}  // namespace lossd::bench
