// SPDX-License-Identifier: Apache-2.0
// How a hidden state is moved until it has the logits wanted (real_rows.h), the same on the CPU and on a GPU.
#ifndef LOSSD_KERNELS_DATA_MOVES_H_
#define LOSSD_KERNELS_DATA_MOVES_H_

namespace lossd::data {

// Steps by which a hidden state is moved towards the wanted logits, and the part of the error that each takes
// back. The candidates' weight rows are nearly orthogonal, so the error shrinks by half or more each time.
inline constexpr int kMoves = 16;
inline constexpr float kMovePart = 0.9f;

}  // namespace lossd::data

#endif  // LOSSD_KERNELS_DATA_MOVES_H_
