// Makes rows like a real model's (kernels/data) and prints which part of the measured profile they reach.
//
//   real_data_check [--rows=256] [--hidden=2304] [--vocab=49152] [--seed=1]
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/types/span.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/data/profile_check.h"
#include "kernels/data/real_data.h"

ABSL_FLAG(int64_t, rows, 256, "N");
ABSL_FLAG(int64_t, hidden, 2304, "D");
ABSL_FLAG(int64_t, vocab, 49152, "V");
ABSL_FLAG(uint64_t, seed, 1, "of the random numbers");

namespace lossd {
namespace {

constexpr int64_t kBlock = 32;  // rows whose logits are held at once

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int Main() {
  const auto start = std::chrono::steady_clock::now();
  const auto rows = data::RealRows::Create(absl::GetFlag(FLAGS_rows), absl::GetFlag(FLAGS_hidden),
                                           absl::GetFlag(FLAGS_vocab), absl::GetFlag(FLAGS_seed));
  if (!rows.ok()) {
    std::fprintf(stderr, "%s\n", rows.status().ToString().c_str());
    return 1;
  }
  std::printf("planned in %.1f s, at most %d candidates a row\n", SecondsSince(start),
              static_cast<int>(rows->most_candidates()));
  const data::RealData real = data::MakeRealData(*rows);
  std::printf("made in %.1f s\n", SecondsSince(start));

  kernels::ThreadPool pool(static_cast<int>(std::thread::hardware_concurrency()));
  const int64_t d = rows->hidden_size(), v = rows->vocab_size();
  data::ProfileCheck check(data::RealProfile());
  std::vector<float> logits(static_cast<size_t>(kBlock * v));
  for (int64_t begin = 0; begin < rows->rows(); begin += kBlock) {
    const int64_t count = std::min(kBlock, rows->rows() - begin);
    kernels::Gemm(pool, count, v, d, 1.0f, {real.hidden.data() + begin * d, d}, {real.weight.data(), d, true},
                  0.0f, logits.data(), v);
    for (int64_t i = 0; i < count; ++i) {
      check.Add(absl::MakeSpan(logits).subspan(static_cast<size_t>(i * v), static_cast<size_t>(v)),
                real.targets[static_cast<size_t>(begin + i)]);
    }
  }
  std::printf("%s", check.Text().c_str());
  return 0;
}

}  // namespace
}  // namespace lossd

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return lossd::Main();
}
