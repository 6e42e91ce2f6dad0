// SPDX-License-Identifier: Apache-2.0
#include "kernels/data/real_data.h"

#include <cmath>
#include <numbers>

#include "kernels/data/moves.h"
#include "kernels/data/parallel.h"

namespace lossd::data {
namespace {

uint64_t Mix(uint64_t x) {  // a bijection of 64 bits
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdu;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53u;
  return x ^ (x >> 33);
}

enum class Stream : uint64_t { kWeight = 1, kHidden = 2 };

// Fills out[0, count) with normal noise of this length. A function of its arguments alone.
void FillNoise(uint64_t seed, Stream stream, int64_t row, int64_t count, float length, float* out) {
  const uint64_t key = Mix(Mix(seed ^ (static_cast<uint64_t>(stream) << 60)) + static_cast<uint64_t>(row));
  float squares = 0.0f;
  for (int64_t i = 0; i < count; i += 2) {
    const uint64_t bits = Mix(key + static_cast<uint64_t>(i));
    const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
    const float angle = 2.0f * std::numbers::pi_v<float> * (static_cast<float>(bits & 0xffffff) * 0x1p-24f);
    const float radius = std::sqrt(-2.0f * std::log(u));
    out[i] = radius * std::cos(angle);
    squares += out[i] * out[i];
    if (i + 1 == count) break;
    out[i + 1] = radius * std::sin(angle);
    squares += out[i + 1] * out[i + 1];
  }
  const float scale = length / std::sqrt(squares);
  for (int64_t i = 0; i < count; ++i) out[i] *= scale;
}

void FillWeightRow(const RealRows& rows, int64_t row, float* out) {
  out[0] = rows.class_logits()[static_cast<size_t>(row)] / static_cast<float>(RealRows::kShared);
  FillNoise(rows.seed(), Stream::kWeight, row, rows.hidden_size() - 1, 1.0f, out + 1);
}

float Dot(const float* a, const float* b, int64_t count) {
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// Moves `hidden` [D] within the span of the candidates' weight rows [K, D] to the wanted logits [K]. The
// element that all hidden states share stays.
void MoveTo(const std::vector<float>& logits, const std::vector<float>& weight, int64_t hidden_size,
            float* hidden) {
  const int64_t count = static_cast<int64_t>(logits.size());
  std::vector<float> missing(logits.size());
  for (int move = 0; move < kMoves; ++move) {
    for (int64_t c = 0; c < count; ++c) {
      missing[static_cast<size_t>(c)] =
          kMovePart * (logits[static_cast<size_t>(c)] -
                       Dot(&weight[static_cast<size_t>(c * hidden_size)], hidden, hidden_size));
    }
    for (int64_t c = 0; c < count; ++c) {
      const float* const row = &weight[static_cast<size_t>(c * hidden_size)];
      for (int64_t i = 1; i < hidden_size; ++i) hidden[i] += missing[static_cast<size_t>(c)] * row[i];
    }
  }
}

}  // namespace

void FillWeight(const RealRows& rows, int64_t begin, int64_t end, float* out) {
  for (int64_t row = begin; row < end; ++row)
    FillWeightRow(rows, row, out + (row - begin) * rows.hidden_size());
}

void FillHidden(const RealRows& rows, int64_t begin, int64_t end, float* out, int32_t* targets) {
  const int64_t d = rows.hidden_size();
  std::vector<float> weight;
  for (int64_t index = begin; index < end; ++index) {
    const RealRows::Row row = rows.row(index);
    weight.resize(row.classes.size() * static_cast<size_t>(d));
    for (size_t c = 0; c < row.classes.size(); ++c) {
      FillWeightRow(rows, row.classes[c], &weight[c * static_cast<size_t>(d)]);
    }
    float* const hidden = out + (index - begin) * d;
    hidden[0] = static_cast<float>(RealRows::kShared);
    FillNoise(rows.seed(), Stream::kHidden, index, d - 1, row.noise, hidden + 1);
    MoveTo(row.logits, weight, d, hidden);
    targets[index - begin] = row.target;
  }
}

RealData MakeRealData(const RealRows& rows) {
  const int64_t d = rows.hidden_size();
  RealData data;
  data.hidden.resize(static_cast<size_t>(rows.rows() * d));
  data.weight.resize(static_cast<size_t>(rows.vocab_size() * d));
  data.targets.resize(static_cast<size_t>(rows.rows()));
  InParallel(0, rows.vocab_size(), [&](int64_t begin, int64_t end) {
    FillWeight(rows, begin, end, data.weight.data() + begin * d);
  });
  InParallel(0, rows.rows(), [&](int64_t begin, int64_t end) {
    FillHidden(rows, begin, end, data.hidden.data() + begin * d, data.targets.data() + begin);
  });
  return data;
}

}  // namespace lossd::data
