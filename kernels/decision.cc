#include "kernels/decision.h"

#include <string>

namespace lossd::kernels {
namespace {

absl::string_view Reason(Gradients asked, Decision decision) {
  switch (decision) {
    case Decision::kFiltered:
      return asked == Gradients::kAuto ? "max_dropped_mass allows it" : "it was asked for";
    case Decision::kTooManyCandidates:
      return "too many candidates";
    case Decision::kTooMuchMass:
      return "more than max_dropped_mass would be dropped";
  }
  return "";
}

}  // namespace

Gradients GradientsOf(Decision decision) {
  return decision == Decision::kFiltered ? Gradients::kFiltered : Gradients::kExact;
}

Choice GradientsChoice(Gradients gradients, absl::string_view reason) {
  return {.what = "gradients", .choice = std::string(Name(gradients)), .reason = std::string(reason)};
}

Choice GradientsChoice(Gradients asked, Decision decision) {
  return GradientsChoice(GradientsOf(decision), Reason(asked, decision));
}

}  // namespace lossd::kernels
