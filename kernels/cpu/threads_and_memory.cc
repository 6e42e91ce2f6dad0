// SPDX-License-Identifier: Apache-2.0
// Threads, products, conversions and memory of the CPU backend (threads_and_memory.h), in this order.
#include "kernels/cpu/threads_and_memory.h"

#include <cblas.h>

#include <bit>
#include <cstring>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::kernels {

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { Work(i); });
}

ThreadPool::~ThreadPool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::ParallelFor(int64_t n, int64_t grain, absl::FunctionRef<void(int64_t, int64_t)> body) {
  if (n <= 0) return;
  const int64_t even = (n + threads() - 1) / threads();
  const Loop loop{n, std::max({even, grain, int64_t{1}}), &body};
  if (loop.part >= n) {
    body(0, n);
    return;
  }
  {
    absl::MutexLock lock(&mutex_);
    loop_ = loop;
    busy_ = static_cast<int>(workers_.size());
    ++generation_;
  }
  RunPart(loop, 0);
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](int* busy) { return *busy == 0; }, &busy_));
}

void ThreadPool::RunPart(const Loop& loop, int index) {
  const int64_t begin = loop.part * index;
  if (begin < loop.n) (*loop.body)(begin, std::min(loop.n, begin + loop.part));
}

void ThreadPool::Work(int index) {
  uint64_t seen = 0;
  while (true) {
    Loop loop;
    {
      absl::MutexLock lock(&mutex_);
      const auto ready = [this, &seen]()
                             ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_ || generation_ != seen; };
      mutex_.Await(absl::Condition(&ready));
      if (stopping_) return;
      seen = generation_;
      loop = loop_;
    }
    RunPart(loop, index);
    absl::MutexLock lock(&mutex_);
    --busy_;
  }
}

namespace {

// A thread is worth waking for a range of at least this many multiplications.
constexpr int64_t kLeastWork = int64_t{1} << 18;

const float* Row(const GemmOperand& a, int64_t row) { return a.data + (a.transposed ? row : row * a.stride); }

const float* Column(const GemmOperand& b, int64_t column) {
  return b.data + (b.transposed ? column * b.stride : column);
}

void SingleGemm(int64_t m, int64_t n, int64_t k, float alpha, const GemmOperand& a, const GemmOperand& b,
                float beta, float* c, int64_t stride) {
  cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
              b.transposed ? CblasTrans : CblasNoTrans, static_cast<blasint>(m), static_cast<blasint>(n),
              static_cast<blasint>(k), alpha, a.data, static_cast<blasint>(a.stride), b.data,
              static_cast<blasint>(b.stride), beta, c, static_cast<blasint>(stride));
}

// Adds columns [begin, end) of the sums, at most kColumns columns.
constexpr int64_t kColumns = 512;
void AddSomeColumnSums(const float* a, const float* b, int64_t rows, int64_t cols, int64_t begin, int64_t end,
                       float* sums) {
  double block[kColumns] = {};
  const int64_t width = end - begin;
  for (int64_t row = 0; row < rows; ++row) {
    const float* a_row = a + row * cols + begin;
    if (b == nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) block[i] += double{a_row[i]};
    } else {
      const float* b_row = b + row * cols + begin;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) block[i] += double{a_row[i]} * double{b_row[i]};
    }
  }
  for (int64_t i = 0; i < width; ++i) sums[begin + i] += static_cast<float>(block[i]);
}

}  // namespace

void UseSingleThreadedBlas() { openblas_set_num_threads(1); }

void Gemm(ThreadPool& pool, int64_t m, int64_t n, int64_t k, float alpha, GemmOperand a, GemmOperand b,
          float beta, float* c, int64_t stride) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    for (int64_t row = 0; row < m; ++row) {
      for (float* value = c + row * stride; value != c + row * stride + n; ++value) {
        *value = beta == 0.0f ? 0.0f : *value * beta;
      }
    }
    return;
  }
  // The threads divide the longer side of c.
  if (n >= m) {
    const int64_t grain = std::max<int64_t>(16, kLeastWork / (m * k));
    pool.ParallelFor(n, grain, [&](int64_t begin, int64_t end) {
      SingleGemm(m, end - begin, k, alpha, a, {Column(b, begin), b.stride, b.transposed}, beta, c + begin,
                 stride);
    });
  } else {
    const int64_t grain = std::max<int64_t>(16, kLeastWork / (n * k));
    pool.ParallelFor(m, grain, [&](int64_t begin, int64_t end) {
      SingleGemm(end - begin, n, k, alpha, {Row(a, begin), a.stride, a.transposed}, b, beta,
                 c + begin * stride, stride);
    });
  }
}

void AddColumnSums(ThreadPool& pool, const float* a, const float* b, int64_t rows, int64_t cols,
                   float* sums) {
  if (rows == 0) return;
  const int64_t grain = std::max<int64_t>(64, kLeastWork / rows);
  pool.ParallelFor(cols, grain, [&](int64_t begin, int64_t end) {
    for (int64_t from = begin; from < end; from += kColumns) {
      AddSomeColumnSums(a, b, rows, cols, from, std::min(end, from + kColumns), sums);
    }
  });
}

namespace {

float FromBFloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Adding 0x7fff, and 1 more if the last bit that is kept is odd, rounds to nearest even. NaN would become
// infinity if its upper bits are 0, so it gets one more bit.
uint16_t ToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// Shifting the bits of a half to the place of a float's bits makes the exponent 112 too small. The
// multiplication corrects this, for subnormal halves too. Infinity and NaN get the exponent that they have in
// floats.
float FromFloat16(uint16_t half) {
  const uint32_t magnitude = uint32_t{half} & 0x7fffu;
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  const uint32_t bits = magnitude >= 0x7c00u ? special : std::bit_cast<uint32_t>(scaled);
  return std::bit_cast<float>(bits | ((uint32_t{half} & 0x8000u) << 16));
}

// The exponent of a half is 112 smaller than that of a float (15 instead of 127). 113 << 23 is 2^-14, the
// smallest normal half, and 143 << 23 is 2^16, from which on a half is infinite.
uint16_t ToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Adding 0.5 puts a subnormal half into the low bits; the addition itself rounds it.
  const float sum = std::bit_cast<float>(magnitude) + 0.5f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(sum) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t small_or_normal = magnitude < (113u << 23) ? subnormal : normal;
  const uint32_t half = magnitude >= (143u << 23) ? special : small_or_normal;
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

// Uses memcpy because elements may be unaligned. It compiles to a plain load or store.
template <float (*kConvert)(uint16_t)>
void Widen(const void* from, int64_t n, float* to) {
  const auto* bytes = static_cast<const unsigned char*>(from);
  for (int64_t i = 0; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + 2 * i, sizeof(bits));
    to[i] = kConvert(bits);
  }
}

template <uint16_t (*kConvert)(float)>
void Narrow(const float* from, int64_t n, void* to) {
  auto* bytes = static_cast<unsigned char*>(to);
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t bits = kConvert(from[i]);
    std::memcpy(bytes + 2 * i, &bits, sizeof(bits));
  }
}

}  // namespace

void ToFloat(DType dtype, const void* from, int64_t n, float* to) {
  if (n <= 0) return;
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::kFloat16:
      Widen<FromFloat16>(from, n, to);
      return;
    case DType::kBFloat16:
      Widen<FromBFloat16>(from, n, to);
      return;
  }
}

void FromFloat(DType dtype, const float* from, int64_t n, void* to) {
  if (n <= 0) return;
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::kFloat16:
      Narrow<ToFloat16>(from, n, to);
      return;
    case DType::kBFloat16:
      Narrow<ToBFloat16>(from, n, to);
      return;
  }
}

void AddScaled(DType dtype, const void* from, int64_t n, float scale, float* to) {
  constexpr int64_t kBlock = 1024;  // fits into the first-level cache
  float block[kBlock];
  const auto* bytes = static_cast<const unsigned char*>(from);
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = std::min(kBlock, n - i);
    ToFloat(dtype, bytes + i * static_cast<int64_t>(SizeOf(dtype)), count, block);
    for (int64_t j = 0; j < count; ++j) to[i + j] += scale * block[j];
  }
}

absl::StatusOr<AlignedBytes> AllocateAligned(int64_t bytes) {
  const auto size = static_cast<size_t>(RoundUpToAlignment(std::max<int64_t>(bytes, 1)));
  AlignedBytes memory(static_cast<uint8_t*>(std::aligned_alloc(kMemoryAlignment, size)));
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the system has no ", errors::ExactBytes(bytes), " of memory left"));
  }
  return memory;
}

absl::StatusOr<Arena> Arena::Allocate(int64_t bytes) {
  LOSSD_TRY(AlignedBytes memory, AllocateAligned(bytes));
  std::memset(memory.get(), 0, static_cast<size_t>(bytes));
  Arena arena;
  arena.memory_ = std::move(memory);
  return arena;
}

namespace {

using errors::ExactBytes;
using errors::HumanBytes;

// The bytes by kind, such as "weights 128 B, workspace 4.00 KiB".
std::string ByKind(const MemoryBytes& bytes) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < kMemoryKinds; ++i) {
    if (bytes.by_kind[i] == 0) continue;
    parts.push_back(absl::StrCat(Name(static_cast<MemoryKind>(i)), " ",
                                 HumanBytes(static_cast<double>(bytes.by_kind[i]))));
  }
  return absl::StrJoin(parts, ", ");
}

}  // namespace

MemoryAccounting::Reservation::Reservation(Reservation&& other) noexcept
    : accounting_(std::exchange(other.accounting_, nullptr)),
      bytes_(other.bytes_),
      pending_bytes_(other.pending_bytes_) {}

MemoryAccounting::Reservation& MemoryAccounting::Reservation::operator=(Reservation&& other) noexcept {
  std::swap(accounting_, other.accounting_);
  std::swap(bytes_, other.bytes_);
  std::swap(pending_bytes_, other.pending_bytes_);
  return *this;
}

MemoryAccounting::Reservation::~Reservation() {
  if (accounting_ != nullptr) accounting_->Release(bytes_, pending_bytes_);
}

void MemoryAccounting::Reservation::MarkResident() {
  accounting_->MarkResident(std::exchange(pending_bytes_, 0));
}

absl::StatusOr<MemoryAccounting::Reservation> MemoryAccounting::Reserve(absl::string_view what,
                                                                        const MemoryBytes& bytes,
                                                                        bool filled_at_once) {
  absl::MutexLock lock(&mutex_);
  LOSSD_RETURN_IF_ERROR(CheckLocked(what, bytes, 0));
  for (size_t i = 0; i < kMemoryKinds; ++i) {
    stats_.current.by_kind[i] += bytes.by_kind[i];
    stats_.peak.by_kind[i] = std::max(stats_.peak.by_kind[i], stats_.current.by_kind[i]);
  }
  stats_.peak_total = std::max(stats_.peak_total, stats_.current.Total());
  Reservation reservation(this, bytes);
  if (filled_at_once) reservation.pending_bytes_ = bytes.Total();
  pending_bytes_ += reservation.pending_bytes_;
  return reservation;
}

absl::Status MemoryAccounting::Check(absl::string_view what, const MemoryBytes& bytes,
                                     const MemoryBytes& beside) const {
  absl::MutexLock lock(&mutex_);
  return CheckLocked(what, bytes, beside.Total());
}

absl::Status MemoryAccounting::CheckLocked(absl::string_view what, const MemoryBytes& bytes,
                                           int64_t beside) const {
  const int64_t used = stats_.current.Total() + beside;
  if (stats_.limit > 0 && bytes.Total() > stats_.limit - used) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, " needs ", ExactBytes(bytes.Total()), ": ", ByKind(bytes), "; ", ExactBytes(used),
                     " of the limit of ", ExactBytes(stats_.limit), " are in use"));
  }
  return CheckHost(what, bytes, beside);
}

absl::Status MemoryAccounting::CheckHost(absl::string_view what, const MemoryBytes& bytes,
                                         int64_t beside) const {
  const std::optional<HostMemory::Bound> host = host_.Available();
  if (!host.has_value()) return absl::OkStatus();
  // Memory that was promised before but is not written yet still looks available to the system.
  const int64_t promised =
      std::max({pending_bytes_, stats_.current.Total() - host_.ResidentBytes(), int64_t{0}}) + beside;
  if (bytes.Total() <= host->bytes - promised - reserve_bytes_) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " needs ", ExactBytes(bytes.Total()), ": ", ByKind(bytes), "; ", host->what, ", ",
                   HumanBytes(static_cast<double>(promised)),
                   " are promised and not yet in use, and memory_reserve_bytes keeps ",
                   HumanBytes(static_cast<double>(reserve_bytes_)), " free"));
}

MemoryStats MemoryAccounting::stats() const {
  absl::MutexLock lock(&mutex_);
  return stats_;
}

void MemoryAccounting::MarkResident(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  pending_bytes_ -= bytes;
}

void MemoryAccounting::Release(const MemoryBytes& bytes, int64_t pending_bytes) {
  absl::MutexLock lock(&mutex_);
  pending_bytes_ -= pending_bytes;
  for (size_t i = 0; i < kMemoryKinds; ++i) stats_.current.by_kind[i] -= bytes.by_kind[i];
}

}  // namespace lossd::kernels
