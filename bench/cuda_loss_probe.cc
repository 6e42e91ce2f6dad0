// SPDX-License-Identifier: Apache-2.0
// Reads one microbatch from files, computes it with the CUDA backend and writes the results to files, so that
// tests/kernels/cuda/compare_torch.py can compare them.
//
//   cuda_bench probe DIR
//
// DIR/spec.json names shapes, dtypes and options. DIR/<name>.bin are raw little-endian arrays. The program
// reads hidden [N, D] (hidden_dtype), targets [N] int32, weight [V, D] fp32 and, if the spec has them, bias,
// norm_gain, norm_shift, class_weights and row_weights (fp32). It writes loss.bin, lse.bin and entropy.bin
// [N] fp32, grad_hidden.bin (hidden_dtype) and grad_<param>.bin (fp32).
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "bench/cuda_bench.h"
#include "kernels/cuda/cuda_backend.h"
#include "nlohmann/json.hpp"

namespace lossd::kernels::cuda_loss_probe {
namespace {

using Bytes = std::vector<uint8_t>;

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << status << std::endl;
  std::exit(1);
}

DType ParseDType(const std::string& name) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (name == Name(dtype)) return dtype;
  }
  std::cerr << "unknown dtype " << name << std::endl;
  std::exit(2);
}

Norm ParseNorm(const std::string& name) {
  return name == "layernorm" ? Norm::kLayerNorm : (name == "rmsnorm" ? Norm::kRmsNorm : Norm::kNone);
}

class Files {
 public:
  explicit Files(std::string folder) : folder_(std::move(folder)) {}
  // The content of a file; empty if the file does not exist.
  Bytes Read(const std::string& name) const {
    std::ifstream file(absl::StrCat(folder_, "/", name, ".bin"), std::ios::binary);
    return Bytes(std::istreambuf_iterator<char>(file), {});
  }
  void Write(const std::string& name, const void* data, size_t bytes) const {
    std::ofstream(absl::StrCat(folder_, "/", name, ".bin"), std::ios::binary)
        .write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  }
  nlohmann::json Spec() const {
    std::ifstream file(absl::StrCat(folder_, "/spec.json"));
    return nlohmann::json::parse(file);
  }

 private:
  const std::string folder_;
};

constexpr std::pair<Param, const char*> kParams[] = {{Param::kWeight, "weight"},
                                                     {Param::kBias, "bias"},
                                                     {Param::kNormGain, "norm_gain"},
                                                     {Param::kNormShift, "norm_shift"},
                                                     {Param::kClassWeights, "class_weights"}};

void Probe(const Files& files) {
  const nlohmann::json spec = files.Spec();
  HeadConfig config;
  config.hidden_size = spec.at("hidden");
  config.vocab_size = spec.at("vocab");
  config.has_bias = spec.at("bias");
  config.has_class_weights = spec.at("class_weights");
  config.norm = ParseNorm(spec.at("norm"));
  config.norm_epsilon = spec.at("norm_epsilon");
  config.compute_dtype = ParseDType(spec.at("compute"));
  config.optimizer_state = OptimizerState::kNone;
  const bool fuse = spec.at("fuse_always");
  auto backend =
      CreateCudaBackend({.fused_loss = fuse ? FusedLoss::kWherePossible : FusedLoss::kWhereFaster});
  Check(backend.status());
  auto head = (*backend)->CreateHead(config);
  Check(head.status());
  for (const auto& [param, name] : kParams) {
    if (!HasTensor(config, {param, Role::kValue})) continue;
    Check((*head)->WriteTensor({param, Role::kValue}, 0, ShapeOf(config, param).rows, DType::kFloat32,
                               files.Read(name)));
  }

  Chunk chunk;
  chunk.hidden_dtype = ParseDType(spec.at("hidden_dtype"));
  chunk.options.logit_scale = spec.at("logit_scale");
  chunk.options.softcap = spec.at("softcap");
  chunk.options.label_smoothing = spec.at("label_smoothing");
  chunk.options.z_loss = spec.at("z_loss");
  chunk.options.use_class_weights = config.has_class_weights;
  const Bytes hidden = files.Read("hidden");
  const Bytes targets = files.Read("targets");
  const Bytes row_weights = files.Read("row_weights");
  const int64_t rows = spec.at("rows");
  Bytes grad_hidden(hidden.size());
  std::vector<float> loss(static_cast<size_t>(rows)), lse(loss), entropy(loss);
  const int chunks = spec.at("chunks");
  for (int i = 0; i < chunks; ++i) {
    const int64_t begin = rows * i / chunks;
    const size_t offset = static_cast<size_t>(begin * config.hidden_size) * SizeOf(chunk.hidden_dtype);
    Slice slice;
    slice.rows = rows * (i + 1) / chunks - begin;
    slice.hidden = hidden.data() + offset;
    slice.grad_hidden = grad_hidden.data() + offset;
    slice.targets = reinterpret_cast<const int32_t*>(targets.data()) + begin;
    slice.grad_scale = spec.at("grad_scale");
    if (!row_weights.empty()) slice.row_weights = reinterpret_cast<const float*>(row_weights.data()) + begin;
    slice.out.loss = loss.data() + begin;
    slice.out.lse = lse.data() + begin;
    slice.out.entropy = entropy.data() + begin;
    chunk.slices = absl::MakeSpan(&slice, 1);
    absl::Notification done;
    (*head)->Submit(&chunk, {[](absl::Status status) { Check(status); },
                             [&done](absl::Status status) {
                               Check(status);
                               done.Notify();
                             }});
    done.WaitForNotification();
  }
  files.Write("loss", loss.data(), loss.size() * 4);
  files.Write("lse", lse.data(), lse.size() * 4);
  files.Write("entropy", entropy.data(), entropy.size() * 4);
  files.Write("grad_hidden", grad_hidden.data(), grad_hidden.size());
  for (const auto& [param, name] : kParams) {
    if (!HasTensor(config, {param, Role::kGradient})) continue;
    const TensorShape shape = ShapeOf(config, param);
    Bytes gradient(static_cast<size_t>(shape.elements()) * 4);
    Check((*head)->ReadTensor({param, Role::kGradient}, 0, shape.rows, DType::kFloat32,
                              absl::MakeSpan(gradient)));
    files.Write(absl::StrCat("grad_", name), gradient.data(), gradient.size());
  }
}

}  // namespace
}  // namespace lossd::kernels::cuda_loss_probe

namespace lossd::bench {

int RunCudaLossProbe(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: cuda_bench probe DIR" << std::endl;
    return 2;
  }
  kernels::cuda_loss_probe::Probe(kernels::cuda_loss_probe::Files(argv[1]));
  return 0;
}

}  // namespace lossd::bench
