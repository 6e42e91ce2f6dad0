// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/method_access.h"

namespace lossd::rpc {
namespace {

using access::Role;

constexpr absl::string_view kHeads = "lossd.v1.HeadService";
constexpr absl::string_view kLosses = "lossd.v1.LossService";
constexpr absl::string_view kServer = "lossd.v1.ServerService";

// Rare calls that create, replace, keep or throw away what training has made are audited. Those of every step
// (ComputeLoss, AddGradient, ApplyStep, reads) are not: metrics count them.
constexpr MethodAccess kTable[] = {
    {kServer, "GetServer", Role::kReader, false},       //
    {kServer, "ListStreams", Role::kReader, false},     //
    {kHeads, "DescribeHead", Role::kReader, false},     //
    {kHeads, "ListHeads", Role::kReader, false},        //
    {kHeads, "ListCheckpoints", Role::kReader, false},  //

    {kLosses, "ComputeLoss", Role::kTrainer, false},        //
    {kLosses, "ReleaseMicrobatch", Role::kTrainer, false},  //
    {kHeads, "AddGradient", Role::kTrainer, false},         //
    {kHeads, "GradNorm", Role::kTrainer, false},            //
    {kHeads, "ApplyStep", Role::kTrainer, false},           //
    {kHeads, "ReadTensor", Role::kTrainer, false},          //
    {kHeads, "ZeroGradients", Role::kTrainer, true},        //
    {kHeads, "SaveCheckpoint", Role::kTrainer, true},       //
    {kHeads, "DeleteCheckpoint", Role::kTrainer, true},     //

    {kHeads, "CreateHead", Role::kAdmin, true},      //
    {kHeads, "PlanHead", Role::kAdmin, true},        //
    {kHeads, "DeleteHead", Role::kAdmin, true},      //
    {kHeads, "ResetHead", Role::kAdmin, true},       //
    {kHeads, "SetShares", Role::kAdmin, true},       //
    {kHeads, "WriteTensor", Role::kAdmin, true},     //
    {kHeads, "LoadCheckpoint", Role::kAdmin, true},  //
};

}  // namespace

absl::Span<const MethodAccess> MethodAccessTable() { return kTable; }

const MethodAccess* FindMethodAccess(absl::string_view method) {
  for (const MethodAccess& line : kTable) {
    if (line.method == method) return &line;
  }
  return nullptr;
}

}  // namespace lossd::rpc
