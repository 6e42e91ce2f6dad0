// SPDX-License-Identifier: Apache-2.0
// Makes rows that are like the rows of a real model (kernels/data). The program either prints how closely the
// rows match the measured profile, or writes .npy files with the arrays of kernels/data/real_rows.h, from
// which another program (peers.py) makes the rows.
//
//   real_data [--rows=256] [--hidden=2304] [--vocab=49152] [--seed=1] [--out=FOLDER]
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/cpu/threads_and_memory.h"
#include "kernels/data/real_rows.h"
#include "kernels/data/softmax_profile.h"
#include "proto/tensorfile/npy.h"

ABSL_FLAG(int64_t, rows, 256, "N");
ABSL_FLAG(int64_t, hidden, 2304, "D");
ABSL_FLAG(int64_t, vocab, 49152, "V");
ABSL_FLAG(uint64_t, seed, 1, "of the random numbers");
ABSL_FLAG(std::string, out, "",
          "folder to write arrays to, which must exist; empty: prints the profile reached");

namespace lossd {
namespace {

constexpr int64_t kBlock = 32;  // the number of rows whose logits are in memory at the same time

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <typename T>
absl::Status Write(const std::string& name, formats::DType dtype, const std::vector<int64_t>& shape,
                   const std::vector<T>& values) {
  auto file = formats::CreateNpy(absl::StrCat(absl::GetFlag(FLAGS_out), "/", name, ".npy"), dtype, shape);
  if (!file.ok()) return file.status();
  const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
  if (absl::Status status = (*file)->Append({bytes, values.size() * sizeof(T)}); !status.ok()) return status;
  return (*file)->Finish();
}

absl::Status WriteArrays(const data::RealRows& rows) {
  const data::RealArrays arrays = data::ToArrays(rows);
  const int64_t n = rows.rows();
  absl::Status status = Write("classes", formats::DType::kInt32, {n, arrays.most}, arrays.classes);
  status.Update(Write("logits", formats::DType::kFloat32, {n, arrays.most}, arrays.logits));
  status.Update(Write("counts", formats::DType::kInt32, {n}, arrays.counts));
  status.Update(Write("noise", formats::DType::kFloat32, {n}, arrays.noise));
  status.Update(Write("targets", formats::DType::kInt32, {n}, arrays.targets));
  status.Update(
      Write("first_elements", formats::DType::kFloat32, {rows.vocab_size()}, arrays.first_elements));
  return status;
}

void PrintProfile(const data::RealRows& rows) {
  const auto start = std::chrono::steady_clock::now();
  const data::RealData real = data::MakeRealData(rows);
  std::printf("at most %d candidates a row, made in %.1f s\n", static_cast<int>(rows.most_candidates()),
              SecondsSince(start));
  kernels::ThreadPool pool(static_cast<int>(std::thread::hardware_concurrency()));
  const int64_t d = rows.hidden_size(), v = rows.vocab_size();
  data::ProfileCheck check(data::RealProfile());
  std::vector<float> logits(static_cast<size_t>(kBlock * v));
  for (int64_t begin = 0; begin < rows.rows(); begin += kBlock) {
    const int64_t count = std::min(kBlock, rows.rows() - begin);
    kernels::Gemm(pool, count, v, d, 1.0f, {real.hidden.data() + begin * d, d},
                  {real.weight.data(), d, /*transposed=*/true}, 0.0f, logits.data(), v);
    for (int64_t i = 0; i < count; ++i) {
      check.Add(absl::MakeSpan(logits).subspan(static_cast<size_t>(i * v), static_cast<size_t>(v)),
                real.targets[static_cast<size_t>(begin + i)]);
    }
  }
  std::printf("%s", check.Text().c_str());
}

int Main() {
  const auto rows = data::RealRows::Create(absl::GetFlag(FLAGS_rows), absl::GetFlag(FLAGS_hidden),
                                           absl::GetFlag(FLAGS_vocab), absl::GetFlag(FLAGS_seed));
  absl::Status status = rows.status();
  if (status.ok() && !absl::GetFlag(FLAGS_out).empty()) {
    status = WriteArrays(*rows);
  } else if (status.ok()) {
    PrintProfile(*rows);
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "real_data: %s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace lossd

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return lossd::Main();
}
