// SPDX-License-Identifier: Apache-2.0
// The launches of a fused loss, in their order (fused_loss.h): rows are prepared, the logit pass runs over
// all panels, its tiles are merged, both are repeated for marked panels, and the rows are finished. The
// kernels mark panels on the device; so the host makes all launches, and a launch without marked panels ends
// at once.
#include "kernels/cuda/kernels/hopper/fused_loss.h"

#include "kernels/cuda/kernels/hopper/fused_rows.h"

namespace lossd::kernels::cuda::hopper {
namespace {

LogitOperands MakeOperands(const FusedOperands& from, const LossTerms& terms, const RowInputs& in) {
  return {.hidden = from.hidden,
          .weight = from.weight,
          .dtype = from.dtype,
          .inner = from.inner,
          .rows = in.padded_rows,
          .classes = terms.vocab,
          .padded_classes = from.padded_classes,
          .form = {terms.IsGeneral(), terms.scale, terms.bias, terms.softcap},
          .targets = in.targets};
}

TilePartials PartialsOf(const FusedLossParams& params) {
  TilePartials partials = params.rows.partials;
  if (!params.terms.NeedsEntropy()) partials.spread = nullptr;
  return partials;
}

// The pass over all panels, or over the panels that were marked after that pass.
StatisticsPass Statistics(const FusedLossParams& params, bool marked) {
  StatisticsPass pass = {{params.rows.reference, params.rows.threshold}, PartialsOf(params), {}};
  if (marked) {
    pass.panels = MarkedPanels{params.rows.marked_panels};
  } else {
    pass.panels = AllPanels{params.order, params.rows.claimed_positions};
  }
  return pass;
}

// Calls the launches in order until one fails.
template <typename... Launches>
cudaError_t InOrder(const Launches&... launches) {
  cudaError_t error = cudaSuccess;
  ((error = error == cudaSuccess ? launches() : error), ...);
  return error;
}

// Computes the sums of all rows: one pass over all panels, and one over the panels whose sums were too large
// for their reference.
template <typename All, typename Marked>
cudaError_t SumRows(const FusedLossParams& params, const All& all, const Marked& marked, int clusters,
                    cudaStream_t stream) {
  const LogitOperands operands = MakeOperands(params.operands, params.terms, params.in);
  const int64_t rows = params.in.rows;
  return InOrder([&] { return LaunchLogitPass(operands, all, clusters, stream); },
                 [&] { return LaunchMergeTiles(params.terms, rows, params.rows, stream); },
                 [&] { return LaunchLogitPass(operands, marked, clusters, stream); },
                 [&] { return LaunchMergeMarkedTiles(params.terms, rows, params.rows, stream); });
}

cudaError_t SumRows(const FusedLossParams& params, int clusters, cudaStream_t stream) {
  return SumRows(params, Statistics(params, false), Statistics(params, true), clusters, stream);
}

// As SumRows, but also stores the exponentials.
cudaError_t SumRowsStored(const FusedLossParams& params, void* exponentials, int clusters,
                          cudaStream_t stream) {
  const StatisticsPass all = Statistics(params, false), marked = Statistics(params, true);
  if (!params.terms.any_coef_entropy) {
    return SumRows(params, ExponentialsPass{all, exponentials}, ExponentialsPass{marked, exponentials},
                   clusters, stream);
  }
  const float* const coef = params.in.coef_entropy;
  return SumRows(params, RecoverablePass{all, coef, exponentials},
                 RecoverablePass{marked, coef, exponentials}, clusters, stream);
}

// Lists the candidates that the first pass could not list, now that the sums are complete. fused_rows.h says
// why two more passes are needed.
cudaError_t CompleteLists(const FusedLossParams& params, const CandidateLists& lists, int clusters,
                          cudaStream_t stream) {
  const LogitOperands operands = MakeOperands(params.operands, params.terms, params.in);
  const FusedRows& rows = params.rows;
  const CompleteSums sums = {rows.reference, rows.partials.target, lists};
  const SecondListingPass second = {sums, rows.marked_panels};
  const LastListingPass last = {sums, {rows.marked_panels}};
  return InOrder([&] { return LaunchPrepareSecondListing(params.terms, params.in, rows, lists, stream); },
                 [&] { return LaunchLogitPass(operands, second, clusters, stream); },
                 [&] { return LaunchPrepareLastListing(params.in, rows, lists, stream); },
                 [&] { return LaunchLogitPass(operands, last, clusters, stream); });
}

}  // namespace

cudaError_t LaunchFusedSums(const FusedLossParams& params, void* exponentials, int clusters,
                            cudaStream_t stream) {
  return InOrder([&] { return LaunchPrepareRows(params.terms, params.in, params.rows, stream); },
                 [&] {
                   return exponentials != nullptr ? SumRowsStored(params, exponentials, clusters, stream)
                                                  : SumRows(params, clusters, stream);
                 });
}

cudaError_t LaunchFusedFinish(const FusedLossParams& params, void* exponentials, GradientRule* rules,
                              cudaStream_t stream) {
  const LossTerms& terms = params.terms;
  const RowInputs& in = params.in;
  const RowResults& out = params.out;
  const FusedRows& rows = params.rows;
  if (rules != nullptr) return LaunchFinishRules(terms, in, out, rows, rules, stream);
  if (exponentials == nullptr) return LaunchFinishRows(terms, in, out, rows, stream);
  const int64_t ld = params.operands.padded_classes;
  return InOrder([&] { return LaunchFinishExponentials(terms, in, out, rows, exponentials, ld, stream); },
                 [&] {
                   if (!terms.any_coef_entropy) return cudaSuccess;
                   return LaunchEntropyGradient(terms, in, rows, exponentials, ld, stream);
                 });
}

cudaError_t LaunchFusedResults(const FusedLossParams& params, int clusters, cudaStream_t stream) {
  return InOrder([&] { return LaunchFusedSums(params, nullptr, clusters, stream); },
                 [&] { return LaunchFusedFinish(params, nullptr, nullptr, stream); });
}

cudaError_t LaunchFusedExponentials(const FusedLossParams& params, void* exponentials, int clusters,
                                    cudaStream_t stream) {
  return InOrder([&] { return LaunchFusedSums(params, exponentials, clusters, stream); },
                 [&] { return LaunchFusedFinish(params, exponentials, nullptr, stream); });
}

cudaError_t LaunchFusedRules(const FusedLossParams& params, GradientRule* rules, int clusters,
                             cudaStream_t stream) {
  return InOrder([&] { return LaunchFusedSums(params, nullptr, clusters, stream); },
                 [&] { return LaunchFusedFinish(params, nullptr, rules, stream); });
}

cudaError_t LaunchFusedCandidates(const FusedLossParams& params, const CandidateLists& lists, int clusters,
                                  cudaStream_t stream) {
  const ListingPass listing = {{params.rows.reference, params.rows.threshold},
                               PartialsOf(params),
                               lists,
                               {params.order, params.rows.claimed_positions}};
  return InOrder([&] { return LaunchPrepareRows(params.terms, params.in, params.rows, lists, stream); },
                 [&] { return SumRows(params, listing, Statistics(params, true), clusters, stream); },
                 [&] { return LaunchFinishRows(params.terms, params.in, params.out, params.rows, stream); },
                 [&] { return CompleteLists(params, lists, clusters, stream); });
}

cudaError_t LaunchFusedGradient(const FusedGradientParams& params, int clusters, cudaStream_t stream) {
  LogitOperands operands = MakeOperands(params.operands, params.terms.From(params.first_class), params.in);
  operands.classes = params.classes;
  operands.first_class = params.first_class;
  return LaunchLogitPass(operands, GradientPass{params.rules, params.gradient}, clusters, stream);
}

}  // namespace lossd::kernels::cuda::hopper
