// SPDX-License-Identifier: Apache-2.0
#include "client/plan/cards.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/errors/field_error.h"

namespace lossd::plan {
namespace {

// NVIDIA's data sheets; arithmetic in bf16 without sparsity.
struct Sheet {
  absl::string_view name;
  Card card;
  double teraflops = 0.0;
  double terabytes_per_second = 0.0;
};

const std::vector<Sheet>& Sheets() {
  constexpr int64_t kGigabyte = 1'000'000'000;
  static const auto* const sheets =
      new std::vector<Sheet>{{"h100-nvl", {"NVIDIA H100 NVL", 94 * kGigabyte, 132, 66}, 835.0, 3.9},
                             {"h100-sxm", {"NVIDIA H100 SXM", 80 * kGigabyte, 132, 66}, 989.0, 3.35},
                             {"h200", {"NVIDIA H200", 141 * kGigabyte, 132, 66}, 989.0, 4.8}};
  return *sheets;
}

template <typename Is>
const Sheet* Find(const Is& is) {
  const auto it = std::find_if(Sheets().begin(), Sheets().end(), is);
  return it == Sheets().end() ? nullptr : &*it;
}

}  // namespace

std::vector<std::string> CardNames() {
  std::vector<std::string> names;
  for (const Sheet& sheet : Sheets()) names.emplace_back(sheet.name);
  return names;
}

absl::StatusOr<Measured> OnCard(Measured measured, absl::string_view name) {
  const Sheet* const wanted = Find([&](const Sheet& sheet) { return sheet.name == name; });
  if (wanted == nullptr) {
    return errors::FieldError("card", absl::StrCat("be one of ", absl::StrJoin(CardNames(), ", ")), name);
  }
  if (wanted->card.name == measured.card.name) return measured;
  const Sheet* const known = Find([&](const Sheet& sheet) { return sheet.card.name == measured.card.name; });
  if (known == nullptr) {
    return errors::FieldError("card",
                              absl::StrCat("not be given with rates of an ", measured.card.name,
                                           ", of which no data sheet is known"),
                              name);
  }
  const double arithmetic = known->teraflops / wanted->teraflops;
  const double bandwidth = known->terabytes_per_second / wanted->terabytes_per_second;
  measured.bounds = CardBounds{.measured_on = measured.card.name,
                               .least = std::min(arithmetic, bandwidth),
                               .most = std::max(arithmetic, bandwidth)};
  measured.card = wanted->card;
  for (PassRate& pass : measured.passes)
    pass.gbps /= bandwidth;  // they read and write, and compute next to nothing
  measured.devices.clear();
  const auto of_gpu = [](const TransportRate& rate) { return rate.transport == "cuda_ipc"; };
  measured.transports.erase(std::remove_if(measured.transports.begin(), measured.transports.end(), of_gpu),
                            measured.transports.end());
  return measured;
}

}  // namespace lossd::plan
