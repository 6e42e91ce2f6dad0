// SPDX-License-Identifier: Apache-2.0
// Measures the latency of one well-behaved trainer while another client of the same server (the neighbor) is
// idle, greedy, or takes no answers. The measured time is the time of a microbatch, from its opening message
// to the summary.
//
//   neighbours_bench [--server=bin/lossd] [--seconds=8] [--server_flags=--peer_share=1,...]
//
// Prints a line of JSON for each kind of neighbor: microbatches, failed microbatches, p50 and p99 in
// milliseconds, and the growth of the server's resident memory. Each kind has a server of its own, with the
// CPU backend.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "tests/server/service/service_client.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"

ABSL_FLAG(std::string, server, "", "The server to measure; empty: the one beside this program");
ABSL_FLAG(double, seconds, 8.0, "How long to measure beside each neighbour");
ABSL_FLAG(std::vector<std::string>, server_flags, {}, "More flags of the server, separated by commas");
ABSL_FLAG(std::vector<std::string>, neighbours, {}, "Which ones; empty: all");

namespace lossd::bench {
namespace {

using app::testing::LossAnswers;
using app::testing::TestClient;
using test::RawHttp2;

constexpr int64_t kHidden = 64;
constexpr int64_t kVocab = 512;
constexpr int64_t kRows = 128;            // the rows of the trainer's microbatches
constexpr int64_t kSliceBytes = 1 << 16;  // the same as in server_process.h
constexpr int64_t kSliceRows = kSliceBytes / kHidden / 4;
constexpr const char* kLossMethod = "/lossd.v1.LossService/ComputeLoss";

v1::OpenMicrobatch Open(uint64_t id, int64_t rows, bool accumulate) {
  v1::OpenMicrobatch open;
  open.set_head("head");
  open.set_microbatch_id(id);
  open.set_microbatch_rows(static_cast<uint64_t>(rows));
  open.mutable_rows()->set_end(static_cast<uint64_t>(rows));
  open.set_hidden_dtype(v1::DTYPE_FP32);
  open.set_reduction(v1::REDUCTION_SUM);
  open.set_want_grad_hidden(true);
  open.mutable_targets()->Resize(static_cast<int>(rows), 1);
  if (accumulate) {
    open.set_step(0);
    open.set_accumulate_gradients(true);
  }
  return open;
}

v1::CreateHeadRequest Head(const std::string& name, int64_t vocab) {
  v1::CreateHeadRequest request;
  request.mutable_spec()->set_name(name);
  request.mutable_spec()->set_hidden_size(kHidden);
  request.mutable_spec()->set_vocab_size(static_cast<uint64_t>(vocab));
  return request;
}

// A client that attacks the server from a thread of its own until the object is destroyed.
class Neighbour {
 public:
  explicit Neighbour(std::function<void(const std::atomic<bool>&)> run)
      : thread_([this, run = std::move(run)] { run(stop_); }) {}
  ~Neighbour() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// What a neighbor does, until `stop` is true.
using Attack = std::function<void(const std::string& target, const std::atomic<bool>& stop)>;

void PumpUntil(RawHttp2& connection, const std::atomic<bool>& stop) {
  while (!stop) connection.Pump(absl::Milliseconds(20));
}

// Sends a slice of zeros after the messages that the call has already sent.
void SendSlice(RawHttp2& connection, uint32_t call, int64_t begin, int64_t rows) {
  v1::ComputeLossRequest request;
  request.mutable_slice()->mutable_rows()->set_begin(static_cast<uint64_t>(begin));
  request.mutable_slice()->mutable_rows()->set_end(static_cast<uint64_t>(begin + rows));
  // Protobuf writes the message without its payload. The payload's tag and length are appended here, and its
  // bytes are sent after them.
  std::string text = request.SerializeAsString();
  const auto varint = [&text](uint64_t value) {
    for (; value >= 128; value >>= 7) text.push_back(static_cast<char>(value | 128));
    text.push_back(static_cast<char>(value));
  };
  const int64_t bytes = rows * kHidden * 4;
  varint(uint64_t{v1::ComputeLossRequest::kPayloadFieldNumber} << 3 | 2);
  varint(static_cast<uint64_t>(bytes));
  connection.Message(call, static_cast<uint32_t>(static_cast<int64_t>(text.size()) + bytes), text, bytes);
}

// Twelve calls that send rows and do not read the gradients.
void StoppedReader(const std::string& target, const std::atomic<bool>& stop) {
  RawHttp2 connection(target);
  for (uint64_t id = 0; id < 12; ++id) {
    constexpr int64_t kSlices = 64;
    v1::ComputeLossRequest open;
    *open.mutable_open() = Open(1'000'000 + id, kSlices * kSliceRows, /*accumulate=*/false);
    const uint32_t call = connection.Call(kLossMethod);
    connection.Message(call, open.SerializeAsString());
    for (int64_t i = 0; i < kSlices; ++i) SendSlice(connection, call, i * kSliceRows, kSliceRows);
  }
  PumpUntil(connection, stop);
}

// 560 calls that send no rows; every fourth of them does not even send its opening message.
void IdleCalls(const std::string& target, const std::atomic<bool>& stop) {
  RawHttp2 connection(target);
  for (uint64_t id = 0; id < 560; ++id) {
    const uint32_t call = connection.Call(kLossMethod);
    v1::ComputeLossRequest open;
    *open.mutable_open() = Open(1'000'000 + id, 10, /*accumulate=*/true);
    if (id % 4 != 0) connection.Message(call, open.SerializeAsString());
  }
  PumpUntil(connection, stop);
}

// 48 requests of 5 MiB, of which the last byte never comes.
void UnfinishedRequests(const std::string& target, const std::atomic<bool>& stop) {
  RawHttp2 connection(target);
  constexpr int64_t kBytes = int64_t{5} << 20;
  for (int i = 0; i < 48; ++i) {
    connection.Message(connection.Call("/lossd.v1.HeadService/ApplyStep"), kBytes, "", kBytes - 1);
  }
  PumpUntil(connection, stop);
}

// Opens connections from many addresses without end, and closes all of them when it has 1,500.
void ManyConnections(const std::string& target, const std::atomic<bool>& stop) {
  std::vector<std::unique_ptr<RawHttp2>> connections;
  while (!stop) {
    connections.push_back(
        std::make_unique<RawHttp2>(target, absl::StrCat("127.0.0.", 2 + connections.size() % 100)));
    connections.back()->Pump(absl::Milliseconds(1));
    if (connections.size() >= 1500) connections.clear();
  }
}

// Opens microbatches of 100,000 rows and abandons them.
void Abandons(const std::string& target, const std::atomic<bool>& stop) {
  const auto client = TestClient::Connect(target);
  for (uint64_t id = 1'000'000; !stop; ++id) {
    const auto stream = client->OpenLoss();
    stream->SendOpen(Open(id, 100'000, /*accumulate=*/true));
    stream->ReadOne();
    stream->Cancel();
    stream->Finish();
  }
}

// Computes as much as it can, with eight calls at a time.
void Greedy(const std::string& target, const std::atomic<bool>& stop) {
  std::vector<std::thread> calls;
  const auto client = TestClient::Connect(target);
  for (uint64_t i = 0; i < 8; ++i) {
    calls.emplace_back([&, i] {
      const std::string payload(kSliceBytes, '\0');
      for (uint64_t id = 1'000'000 * (i + 1); !stop; ++id) {
        const auto stream = client->OpenLoss();
        stream->SendOpen(Open(id, 4 * kSliceRows, /*accumulate=*/false));
        for (int64_t slice = 0; slice < 4; ++slice)
          stream->SendSlice(slice * kSliceRows, (slice + 1) * kSliceRows, payload);
        stream->Finish();
      }
    });
  }
  for (std::thread& call : calls) call.join();
}

// Nine clients that repeatedly create the same large head.
void Creations(const std::string& target, const std::atomic<bool>& stop) {
  std::vector<std::thread> calls;
  for (int i = 0; i < 9; ++i) {
    calls.emplace_back([&] {
      const auto client = TestClient::Connect(target);
      while (!stop) {
        client->CreateHead(Head("big", 200'000)).status().IgnoreError();
        client->DeleteHead("big").IgnoreError();
      }
    });
  }
  for (std::thread& call : calls) call.join();
}

// Asks for steps with a list of 1.5 million expected microbatches each, which the server has to check.
void Lists(const std::string& target, const std::atomic<bool>& stop) {
  const auto client = TestClient::Connect(target);
  v1::ApplyStepRequest request;
  request.set_head("head");
  request.mutable_optimizer()->mutable_sgd()->set_learning_rate(0.1f);
  for (uint64_t id = 0; id < 1'500'000; ++id) request.add_expected_microbatches(id << 10);
  while (!stop) client->ApplyStep(request).status().IgnoreError();
}

struct Case {
  std::string name;
  Attack attack;
};

std::vector<Case> Cases() {
  return {{"none", [](const std::string&, const std::atomic<bool>&) {}},
          {"stopped reader", &StoppedReader},
          {"idle calls", &IdleCalls},
          {"unfinished requests", &UnfinishedRequests},
          {"connections", &ManyConnections},
          {"abandoned microbatches", &Abandons},
          {"greedy", &Greedy},
          {"creations", &Creations},
          {"lists", &Lists}};
}

int64_t Resident(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/statm"));
  int64_t pages = 0, resident = 0;
  file >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// The seconds of one microbatch; negative if it failed. Also calls DescribeHead, as trainers do.
double Microbatch(TestClient& client, uint64_t id, const std::string& payload) {
  const absl::Time start = clocks::SteadyNow();
  const auto stream = client.OpenLoss(absl::Seconds(5));
  stream->SendOpen(Open(id, kRows, /*accumulate=*/true));
  stream->SendSlice(0, kRows, payload);
  const LossAnswers answers = stream->Finish();
  const bool ok = answers.status.ok() && client.DescribeHead("head").ok();
  const double seconds = absl::ToDoubleSeconds(clocks::SteadyNow() - start);
  return ok ? seconds : -seconds;
}

double Quantile(const std::vector<double>& sorted, double quantile) {
  if (sorted.empty()) return 0.0;
  return sorted[std::min(sorted.size() - 1,
                         static_cast<size_t>(quantile * static_cast<double>(sorted.size())))];
}

std::string ServerProgram() {
  const std::string given = absl::GetFlag(FLAGS_server);
  if (!given.empty()) return given;
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "lossd";
}

nlohmann::json Measure(const Case& one) {
  test::ServerProcess server(ServerProgram(), absl::GetFlag(FLAGS_server_flags));
  const auto client = TestClient::Connect(server.target());
  client->CreateHead(Head("head", kVocab)).status().IgnoreError();
  const std::string payload(kRows * kHidden * 4, '\0');
  uint64_t id = 0;
  for (; id < 20; ++id) Microbatch(*client, id, payload);  // warms up
  const int64_t before = Resident(server.pid());
  int64_t most = before;
  std::vector<double> times;
  int64_t failed = 0;
  {
    const Neighbour neighbour([&](const std::atomic<bool>& stop) { one.attack(server.target(), stop); });
    absl::SleepFor(absl::Milliseconds(500));
    const absl::Time end = clocks::SteadyNow() + absl::Seconds(absl::GetFlag(FLAGS_seconds));
    while (clocks::SteadyNow() < end) {
      // The ids repeat, so that the open step does not grow without end. Repeats are computed, not added.
      const double seconds = Microbatch(*client, id++ % 2000 + 20, payload);
      times.push_back(std::abs(seconds));
      failed += seconds < 0 ? 1 : 0;
      if (id % 50 == 0) most = std::max(most, Resident(server.pid()));
    }
    most = std::max(most, Resident(server.pid()));
    if (!server.Running()) failed = -1;  // the server has crashed
    server.Kill();                       // so that no neighbor keeps waiting for an answer
  }
  std::sort(times.begin(), times.end());
  return {{"neighbour", one.name},
          {"microbatches", times.size()},
          {"failed", failed},
          {"p50_ms", Quantile(times, 0.5) * 1e3},
          {"p99_ms", Quantile(times, 0.99) * 1e3},
          {"grown_mib", static_cast<double>(most - before) / (1 << 20)}};
}

int Run() {
  const std::vector<std::string> wanted = absl::GetFlag(FLAGS_neighbours);
  for (const Case& one : Cases()) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), one.name) == wanted.end()) continue;
    std::cout << Measure(one).dump() << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace lossd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return lossd::bench::Run();
}
