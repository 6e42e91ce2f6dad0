// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/kernels/hopper/pass_memory.h"

#include "kernels/cuda/kernels/hopper/cluster_order.h"
#include "kernels/cuda/kernels/hopper/logit_tiles.h"

namespace lossd::kernels::cuda::hopper {

TilePartials TilePartials::Carve(Carver& carver, int64_t capacity, int64_t vocab) {
  const int64_t count = VocabTiles(vocab) * capacity;
  TilePartials partials;
  partials.ld = capacity;
  partials.max = carver.Take<float>(count);
  partials.sum = carver.Take<float>(count);
  partials.spread = carver.Take<float>(count);
  partials.arg = carver.Take<uint8_t>(count);
  partials.target = carver.Take<float>(capacity);
  return partials;
}

FusedRows FusedRows::Carve(Carver& carver, int64_t capacity) {
  FusedRows w;
  w.reference = carver.Take<float>(capacity);
  w.sum_reference = w.reference;
  w.threshold = carver.Take<float>(capacity);
  w.max = carver.Take<float>(capacity);
  w.sum = carver.Take<float>(capacity);
  w.spread = carver.Take<float>(capacity);
  w.arg = carver.Take<int32_t>(capacity);
  w.factor = carver.Take<float>(capacity);
  w.entropy = carver.Take<EntropyRow>(capacity);
  w.marked_panels = carver.Take<int32_t>(1 + Panels(capacity));
  w.claimed_positions = carver.Take<uint32_t>(kMostClusters);
  return w;
}

}  // namespace lossd::kernels::cuda::hopper
