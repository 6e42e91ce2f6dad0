// SPDX-License-Identifier: Apache-2.0
#include "kernels/data/real_arrays.h"

namespace lossd::data {

RealArrays ToArrays(const RealRows& rows) {
  RealArrays arrays;
  arrays.most = rows.most_candidates();
  for (float logit : rows.class_logits()) {
    arrays.first_elements.push_back(logit / static_cast<float>(RealRows::kShared));
  }
  for (int64_t i = 0; i < rows.rows(); ++i) {
    RealRows::Row row = rows.row(i);
    arrays.counts.push_back(static_cast<int32_t>(row.classes.size()));
    row.classes.resize(static_cast<size_t>(arrays.most));
    row.logits.resize(static_cast<size_t>(arrays.most));
    arrays.classes.insert(arrays.classes.end(), row.classes.begin(), row.classes.end());
    arrays.logits.insert(arrays.logits.end(), row.logits.begin(), row.logits.end());
    arrays.noise.push_back(row.noise);
    arrays.targets.push_back(row.target);
  }
  return arrays;
}

}  // namespace lossd::data
