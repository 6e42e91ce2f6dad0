#include "kernels/decision.h"

#include <string>

namespace lossd::kernels {
namespace {

absl::string_view Reason(Algorithm asked, Decision decision) {
  switch (decision) {
    case Decision::kFiltered:
      return asked == Algorithm::kAuto ? "max_dropped_mass allows it" : "it was asked for";
    case Decision::kTooManyCandidates:
      return "too many candidates";
    case Decision::kTooMuchMass:
      return "more than max_dropped_mass would be dropped";
  }
  return "";
}

}  // namespace

Algorithm AlgorithmOf(Decision decision) {
  return decision == Decision::kFiltered ? Algorithm::kFiltered : Algorithm::kExact;
}

Choice GradientsChoice(Algorithm algorithm, absl::string_view reason) {
  return {.what = "gradients", .choice = std::string(Name(algorithm)), .reason = std::string(reason)};
}

Choice GradientsChoice(Algorithm asked, Decision decision) {
  return GradientsChoice(AlgorithmOf(decision), Reason(asked, decision));
}

}  // namespace lossd::kernels
