// SPDX-License-Identifier: Apache-2.0
#include "server/admin/head_operations.h"

#include <set>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "kernels/errors/status_macros.h"
#include "kernels/replica.h"
#include "server/head/checkpoint_store.h"
#include "server/head/file_sites.h"
#include "server/head/head.h"
#include "server/log/log.h"
#include "server/messages/convert.h"

namespace lossd::admin {

// ---- The log of resets ----

namespace {

// The content of a request: two requests with equal contents ask for the same reset.
std::string ContentOf(const v1::ResetHeadRequest& request) {
  v1::ResetHeadRequest content = request;
  content.clear_head();
  content.clear_reset_id();
  content.clear_incarnation();
  content.DiscardUnknownFields();
  const bool names_values = content.init_case() != v1::ResetHeadRequest::INIT_NOT_SET;
  if (content.scope() == v1::RESET_SCOPE_ALL && !names_values) content.mutable_kaiming_uniform();
  return content.SerializeAsString();
}

}  // namespace

absl::StatusOr<std::optional<v1::ResetHeadResponse>> ResetLog::Find(
    const v1::ResetHeadRequest& request) const {
  return done_.Find(request.head(), request.reset_id(), ContentOf(request));
}

void ResetLog::Add(const v1::ResetHeadRequest& request, const v1::ResetHeadResponse& response) {
  done_.Add(request.head(), request.reset_id(), ContentOf(request), response);
}

void LogChoices(absl::string_view event, absl::string_view head, absl::Span<const kernels::Choice> choices) {
  for (const kernels::Choice& choice : choices) {
    log::Log(log::LogLevel::kDebug, event,
             {{"head", head},
              {"what", choice.what},
              {"choice", choice.choice},
              {"reason", choice.reason},
              {"workspace_bytes", choice.workspace_bytes}});
  }
}

namespace {

using log::LogLevel;

// The fields that ReadTensorRequest and OpenTensor have in common.
struct TensorFields {
  const std::string& head;
  v1::Param param = v1::PARAM_UNSPECIFIED;
  v1::Role role = v1::ROLE_UNSPECIFIED;
  const v1::RowRange* rows = nullptr;  // null: all rows
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
};

// The tensor and the rows that the fields name, with the reader or writer of the head that `open` gives.
// `prefix` stands before the fields' names in errors.
template <typename Opened, typename Open>
absl::StatusOr<Opened> OpenTensor(const TensorFields& fields, absl::string_view prefix, Open open) {
  const auto field = [&](absl::string_view name) { return absl::StrCat(prefix, name); };
  LOSSD_TRY(const kernels::TensorId id, messages::ToTensorId(fields.param, fields.role, prefix));
  LOSSD_TRY(const kernels::DType type,
            messages::ToDType(fields.dtype, field("dtype"), kernels::DType::kFloat32));
  auto opened = open();
  if (!opened.ok()) return errors::Within(prefix, opened.status());
  const kernels::HeadConfig& config = (*opened)->config();
  if (!kernels::HasTensor(config, id)) {
    return errors::FieldError(field("param"), absl::StrCat("be a tensor of head ", fields.head),
                              head::TensorName(id), absl::StatusCode::kNotFound);
  }
  TensorRows tensor{
      .head = fields.head, .id = id, .shape = kernels::ShapeOf(config, id.param), .dtype = type};
  tensor.rows = {0, tensor.shape.rows};
  if (fields.rows != nullptr) {
    LOSSD_TRY(tensor.rows, messages::ToRowRange(*fields.rows, field("rows"), tensor.shape.rows));
  }
  return Opened{std::move(tensor), *std::move(opened)};
}

// The history of a head after the checkpoint was loaded into it.
head::History HistoryOfLoaded(const head::CheckpointReader& checkpoint) {
  const head::CheckpointSubject& saved = checkpoint.subject();
  return {.run = saved.run,
          .applied_unix_seconds = saved.applied_unix_seconds,
          .checkpoint = checkpoint.name(),
          .checkpoint_step = saved.step,
          .checkpoint_unix_seconds = absl::ToUnixSeconds(checkpoint.saved_at()),
          .loaded = true};
}

}  // namespace

HeadOperations::HeadOperations(const HeadOperationsOptions& options, engine::Engine* engine,
                               metrics::Metrics* metrics)
    : options_(options),
      engine_(engine),
      metrics_(metrics),
      checkpoints_(options.checkpoints, engine, metrics, &locks_) {}

// ---- Creation ----

absl::StatusOr<v1::HeadDescription> HeadOperations::CreateHead(const v1::CreateHeadRequest& request) {
  const absl::Cleanup end_reading = [this] { checkpoints_.EndReading(); };  // the source may be a checkpoint
  LOSSD_TRY(const kernels::HeadConfig config,
            messages::ToHeadConfig(request.spec(), "spec.", options_.default_compute_dtype));
  const std::string& name = request.spec().name();
  const NamedLocks::Guard guard = locks_.Lock(name);
  absl::Status status;
  if (request.has_tensor_file()) {
    if (status = checkpoints_.PrepareDirectory(); !status.ok()) return status;
  }
  LOSSD_TRY(const InitialValues values, InitialValues::Open(options_.checkpoints.directory, request, config));
  status = CreateFilled(name, config, [&] { return FillHead(name, values, /*used=*/false); });
  if (!status.ok()) return status;
  absl::StatusOr<v1::HeadDescription> description = Description(name);
  if (description.ok()) LogHead("head_created", *description);
  return description;
}

absl::StatusOr<v1::HeadDescription> HeadOperations::PlanHead(const v1::CreateHeadRequest& request) {
  const absl::Cleanup end_reading = [this] { checkpoints_.EndReading(); };
  LOSSD_TRY(const kernels::HeadConfig config,
            messages::ToHeadConfig(request.spec(), "spec.", options_.default_compute_dtype));
  LOSSD_TRY(const InitialValues values, InitialValues::Open(options_.checkpoints.directory, request, config));
  const absl::StatusOr<engine::HeadSnapshot> plan = engine_->PlanHead(request.spec().name(), config);
  if (!plan.ok()) return errors::Within("spec.", plan.status());
  return messages::ToProto(*plan);
}

absl::Status HeadOperations::CreateFilled(const std::string& name, const kernels::HeadConfig& config,
                                          absl::FunctionRef<absl::Status()> fill) {
  if (absl::Status status = engine_->CreateHead(name, config); !status.ok()) {
    return errors::Within("spec.", std::move(status));
  }
  absl::Status status = fill();
  if (status.ok()) status = engine_->PublishHead(name);
  if (!status.ok()) {
    engine_->DeleteHead(name).IgnoreError();  // the first error is returned
    return status;
  }
  const absl::StatusOr<engine::HeadSnapshot> head = engine_->Describe(name);
  if (head.ok()) LogChoices("head computes", name, head->choices);
  return absl::OkStatus();
}

absl::Status HeadOperations::FillHead(const std::string& head, const InitialValues& values, bool used) {
  return values.Fill(used, options_.transfer_bytes,
                     [&](kernels::TensorId id, engine::RowRange rows, kernels::DType dtype,
                         absl::Span<const uint8_t> bytes) {
                       return engine_->OnDevice(head, [&](head::Head& on_device) {
                         return on_device.WriteRows(id, rows.begin, rows.size(), dtype, bytes);
                       });
                     });
}

// ---- Description and deletion ----

void HeadOperations::LogHead(absl::string_view kind, const v1::HeadDescription& head) {
  const std::string event = absl::StrReplaceAll(kind, {{"_", " "}});
  metrics_->events().Add(metrics::EventLevel::kInfo, kind, head.spec().name(),
                         absl::StrCat(event, ": ", head.spec().vocab_size(), " classes of ",
                                      head.spec().hidden_size(), " values, step ", head.state().step()));
  log::Log(LogLevel::kInfo, event,
           {{"head", head.spec().name()},
            {"vocab_size", head.spec().vocab_size()},
            {"hidden_size", head.spec().hidden_size()},
            {"step", head.state().step()}});
}

absl::StatusOr<v1::HeadDescription> HeadOperations::Description(absl::string_view head) {
  LOSSD_TRY(const engine::HeadSnapshot snapshot, engine_->Describe(head));
  return messages::ToProto(snapshot);
}

absl::StatusOr<v1::HeadState> HeadOperations::State(absl::string_view head) {
  LOSSD_TRY(const engine::HeadSnapshot snapshot, engine_->Describe(head));
  return messages::ToProto(snapshot.state);
}

absl::StatusOr<v1::HeadDescription> HeadOperations::DescribeHead(const v1::DescribeHeadRequest& request) {
  return Description(request.head());
}

absl::StatusOr<v1::ListHeadsResponse> HeadOperations::ListHeads(const v1::ListHeadsRequest& request) {
  v1::ListHeadsResponse response;
  for (const engine::HeadSnapshot& head : engine_->List()) {
    *response.add_heads() = messages::ToProto(head);
    response.mutable_heads()->rbegin()->mutable_spec()->clear_class_list();  // class lists are long
  }
  return response;
}

absl::StatusOr<v1::DeleteHeadResponse> HeadOperations::DeleteHead(const v1::DeleteHeadRequest& request) {
  const NamedLocks::Guard guard = locks_.Lock(request.head());
  LOSSD_RETURN_IF_ERROR(engine_->DeleteHead(request.head()));
  resets_.Forget(request.head());
  divisions_.Forget(request.head());
  metrics_->ForgetHead(request.head());
  metrics_->events().Add(metrics::EventLevel::kInfo, "head_deleted", request.head(), "head deleted");
  log::Log(LogLevel::kInfo, "head deleted", {{"head", request.head()}});
  return v1::DeleteHeadResponse();
}

// ---- Steps ----

absl::StatusOr<v1::GradNormResponse> HeadOperations::GradNorm(const v1::GradNormRequest& request) {
  LOSSD_RETURN_IF_ERROR(messages::CheckRun("run", request.run()));
  const NamedLocks::Guard guard = locks_.Lock(request.head());
  std::optional<uint64_t> step;
  if (request.has_step()) step = request.step();
  LOSSD_TRY(const engine::GradNormResult norm, engine_->GradNorm(request.head(), step, request.run()));
  v1::GradNormResponse response;
  *response.mutable_state() = messages::ToProto(norm.state);
  response.set_grad_norm(norm.grad_norm);
  return response;
}

absl::StatusOr<v1::ApplyStepResponse> HeadOperations::ApplyStep(const v1::ApplyStepRequest& request) {
  LOSSD_TRY(const engine::StepRequest step, messages::ToStepRequest(request));
  const NamedLocks::Guard guard = locks_.Lock(request.head());
  LOSSD_TRY(const engine::StepResult result, engine_->ApplyStep(request.head(), step));
  v1::ApplyStepResponse response;
  *response.mutable_state() = messages::ToProto(result.state);
  response.set_grad_norm(result.grad_norm);
  response.set_microbatches(static_cast<uint64_t>(result.microbatches));
  response.set_rows(static_cast<uint64_t>(result.rows));
  response.set_repeated_call(result.repeated);
  response.set_applied_incarnation(result.applied_incarnation);
  response.set_skipped(result.skipped);
  response.set_contributions(static_cast<uint64_t>(result.contributions));
  log::Log(LogLevel::kDebug, "step applied",
           {{"head", request.head()},
            {"step", request.step()},
            {"grad_norm", result.grad_norm},
            {"rows", result.rows},
            {"skipped", result.skipped},
            {"repeated", result.repeated}});
  return response;
}

absl::StatusOr<v1::ZeroGradientsResponse> HeadOperations::ZeroGradients(
    const v1::ZeroGradientsRequest& request) {
  LOSSD_RETURN_IF_ERROR(messages::CheckRun("run", request.run()));
  const NamedLocks::Guard guard = locks_.Lock(request.head());
  LOSSD_TRY(const engine::HeadState state,
            engine_->ZeroGradients(request.head(), request.step(), request.run()));
  v1::ZeroGradientsResponse response;
  *response.mutable_state() = messages::ToProto(state);
  return response;
}

// ---- Checkpoints ----

absl::StatusOr<v1::HeadDescription> HeadOperations::LoadCheckpoint(const v1::LoadCheckpointRequest& request) {
  LOSSD_RETURN_IF_ERROR(checkpoints_.PrepareDirectory());
  const absl::Cleanup end_reading = [this] { checkpoints_.EndReading(); };
  LOSSD_TRY(const std::unique_ptr<head::CheckpointReader> reader,
            head::CheckpointReader::Open(options_.checkpoints.directory, request.checkpoint()));
  const head::CheckpointSubject& saved = reader->subject();
  const std::string name = request.head().empty() ? saved.head : request.head();
  LOSSD_RETURN_IF_ERROR(messages::CheckName("head", name));
  const NamedLocks::Guard guard = locks_.Lock(name);
  const absl::StatusOr<engine::HeadSnapshot> existing = engine_->Describe(name);
  absl::Status status;
  if (existing.ok()) {
    status = head::CheckLoadable(saved.config, existing->config);
    if (status.ok()) status = WriteLoaded(name, existing->config, *reader, /*is_new=*/false);
  } else {
    status = CreateLoaded(name, saved.config, *reader);
  }
  if (!status.ok()) return status;
  absl::StatusOr<v1::HeadDescription> description = Description(name);
  if (description.ok()) LogHead("checkpoint_loaded", *description);
  return description;
}

absl::Status HeadOperations::CreateLoaded(const std::string& head, kernels::HeadConfig config,
                                          const head::CheckpointReader& reader) {
  const auto create = [&] {
    return CreateFilled(head, config, [&] { return WriteLoaded(head, config, reader, /*is_new=*/true); });
  };
  // Shares, replicas and residency suit the devices that the head was saved on; the head's values do not
  // depend on them. So a server on which they do not fit creates the head without them. The more replicas a
  // head has, the more of its classes each device holds, and fewer devices may lack the memory for that.
  const auto drop_what_does_not_suit = [&config](const absl::Status& status) {
    const auto violation = errors::GetFieldViolation(status);
    const std::string field = violation ? violation->field : "";
    if (!config.shares.empty() && absl::StartsWith(field, "spec.shares")) {
      config.shares.clear();
      return true;
    }
    if (config.residency != kernels::Residency::kDevice && field == "spec.residency") {
      config.residency = kernels::Residency::kDevice;
      return true;
    }
    const bool too_many = field == "spec.replicas" || absl::IsResourceExhausted(status);
    if (kernels::ReplicasOf(config) == 1 || !too_many) return false;
    config.replicas = 0;
    return true;
  };
  absl::Status status = create();
  while (!status.ok() && drop_what_does_not_suit(status)) status = create();
  return status;
}

absl::Status HeadOperations::WriteLoaded(const std::string& head, const kernels::HeadConfig& config,
                                         const head::CheckpointReader& reader, bool is_new) {
  const head::CheckpointSubject& saved = reader.subject();
  head::SiteLoading sites(config, checkpoints_.LoadSites(head));
  sites.Open(reader.name(), reader.content_digest());
  const auto skip_writes_to = [&](const std::vector<int>& ranks) {
    return engine_->OnDevice(head, [&](head::Head& on_device) {
      on_device.kernels().SkipWritesTo(ranks);
      return absl::OkStatus();
    });
  };
  const auto begin = [&] {
    absl::Status status =
        engine_->BeginLoad(head, {saved.step, saved.updates}, saved.last_step, HistoryOfLoaded(reader));
    if (status.ok()) status = skip_writes_to(sites.ranks());
    if (status.ok()) sites.Start();
    return status;
  };
  bool begun = false;
  head::LoadOptions options = checkpoints_.LoadOptions(/*verify_first=*/!is_new);
  options.wanted = [&](const head::TensorPart& part) { return sites.Wants(part); };
  absl::Status status = reader.Load(
      [&](kernels::TensorId id, int64_t row_begin, int64_t rows, absl::Span<const uint8_t> in) {
        if (!std::exchange(begun, true)) LOSSD_RETURN_IF_ERROR(begin());
        return engine_->OnDevice(head, [&](head::Head& on_device) {
          return on_device.WriteRows(id, row_begin, rows, kernels::DType::kFloat32, in);
        });
      },
      options);
  status = sites.Await(std::move(status));
  if (begun) status.Update(skip_writes_to({}));
  if (!status.ok()) return status;
  return engine_->EndLoad(head);
}

// ---- Tensors ----

absl::StatusOr<TensorRead> HeadOperations::OpenRead(const v1::ReadTensorRequest& request) {
  const TensorFields fields{.head = request.head(),
                            .param = request.param(),
                            .role = request.role(),
                            .rows = request.has_rows() ? &request.rows() : nullptr,
                            .dtype = request.dtype()};
  return OpenTensor<TensorRead>(fields, "", [&] { return engine_->OpenReader(request.head()); });
}

absl::StatusOr<TensorWrite> HeadOperations::OpenWrite(const v1::OpenTensor& open) {
  if (open.role() == v1::ROLE_GRADIENT) {
    return errors::FieldError("open.role", "not be ROLE_GRADIENT: gradients only accumulate", "ROLE_GRADIENT",
                              absl::StatusCode::kFailedPrecondition);
  }
  const TensorFields fields{.head = open.head(),
                            .param = open.param(),
                            .role = open.role(),
                            .rows = open.has_rows() ? &open.rows() : nullptr,
                            .dtype = open.dtype()};
  auto write = OpenTensor<TensorWrite>(fields, "open.", [&] { return engine_->OpenWriter(open.head()); });
  if (write.ok()) write->writer->SetRows(write->tensor.id, write->tensor.rows);
  return write;
}

absl::StatusOr<v1::HeadState> HeadOperations::ReadRows(const TensorRead& read, engine::RowRange rows,
                                                       absl::Span<uint8_t> out) {
  LOSSD_TRY(const auto state, read.reader->Read(read.tensor.id, rows, read.tensor.dtype, out));
  return messages::ToProto(state);
}

absl::StatusOr<v1::HeadState> HeadOperations::WriteRows(const TensorWrite& write, engine::RowRange rows,
                                                        absl::Span<const uint8_t> in) {
  const NamedLocks::Guard guard = locks_.Lock(write.tensor.head);
  LOSSD_TRY(const auto state, write.writer->Write(rows, write.tensor.dtype, in));
  return messages::ToProto(state);
}

// ---- The start of the server ----

absl::Status RestoreLatest(HeadOperations& operations) {
  const std::string& directory = operations.checkpoints().options().directory;
  LOSSD_RETURN_IF_ERROR(operations.checkpoints().PrepareDirectory());
  LOSSD_TRY(const std::vector<head::CheckpointInfo> found, head::ListCheckpoints(directory, ""));
  std::set<std::string> restored;
  for (const head::CheckpointInfo& checkpoint : found) {  // for each head from the newest to the oldest
    if (!checkpoint.status.ok()) {
      log::Log(log::LogLevel::kWarning, "checkpoint passed over",
               {{"checkpoint", checkpoint.name}, {"reason", checkpoint.status.message()}});
      continue;
    }
    if (!restored.insert(checkpoint.subject.head).second) continue;
    v1::LoadCheckpointRequest request;
    request.set_checkpoint(checkpoint.name);
    const absl::Status status = operations.LoadCheckpoint(request).status();
    if (!status.ok()) {
      return errors::WithMessage(
          status, absl::StrCat("cannot restore ", checkpoint.name,
                               " (move it away to restore the one before): ", status.message()));
    }
  }
  log::Log(log::LogLevel::kInfo, "heads restored", {{"directory", directory}, {"heads", restored.size()}});
  return absl::OkStatus();
}

// ---- Resets ----

namespace {

absl::Status CheckReset(const v1::ResetHeadRequest& request, uint64_t incarnation) {
  LOSSD_RETURN_IF_ERROR(messages::CheckCallId("reset_id", request.reset_id()));
  if (request.scope() != v1::RESET_SCOPE_OPTIMIZER && request.scope() != v1::RESET_SCOPE_ALL) {
    return errors::FieldError("scope", "be RESET_SCOPE_OPTIMIZER or RESET_SCOPE_ALL",
                              static_cast<int>(request.scope()));
  }
  const bool names_values = request.init_case() != v1::ResetHeadRequest::INIT_NOT_SET;
  if (names_values && request.scope() != v1::RESET_SCOPE_ALL) {
    return errors::FieldError("init", "come with RESET_SCOPE_ALL only", "values with RESET_SCOPE_OPTIMIZER");
  }
  if (!request.has_incarnation()) return absl::OkStatus();
  return messages::CheckIncarnation("incarnation", request.incarnation(), incarnation);
}

}  // namespace

absl::StatusOr<v1::ResetHeadResponse> HeadOperations::ResetHead(const v1::ResetHeadRequest& request) {
  const absl::Cleanup end_reading = [this] { checkpoints_.EndReading(); };
  LOSSD_RETURN_IF_ERROR(CheckReset(request, engine_->incarnation()));
  const NamedLocks::Guard guard = locks_.Lock(request.head());
  LOSSD_TRY(const engine::HeadSnapshot head, engine_->Describe(request.head()));
  LOSSD_TRY(std::optional<v1::ResetHeadResponse> done, resets_.Find(request));
  if (done.has_value()) {
    done->set_repeated_call(true);
    return *std::move(done);
  }
  LOSSD_RETURN_IF_ERROR(ResetInTurn(request, head));
  LOSSD_TRY(v1::HeadDescription description, Description(request.head()));
  const bool all = request.scope() == v1::RESET_SCOPE_ALL;
  LogHead(all ? "head_reset" : "optimizer_reset", description);
  v1::ResetHeadResponse response;
  *response.mutable_head() = std::move(description);
  resets_.Add(request, response);
  return response;
}

absl::Status HeadOperations::ResetInTurn(const v1::ResetHeadRequest& request,
                                         const engine::HeadSnapshot& head) {
  if (request.scope() == v1::RESET_SCOPE_OPTIMIZER) {
    return engine_->Reset(head.name, engine::ResetScope::kOptimizer).status();
  }
  if (request.has_tensor_file()) LOSSD_RETURN_IF_ERROR(checkpoints_.PrepareDirectory());
  LOSSD_TRY(const InitialValues values,
            InitialValues::Open(options_.checkpoints.directory, request, head.config));
  // Find errors of reading before anything is written.
  LOSSD_RETURN_IF_ERROR(values.CheckReadable(options_.transfer_bytes));
  absl::Status status = engine_->Reset(head.name, engine::ResetScope::kAll).status();
  if (status.ok()) status = FillHead(head.name, values, /*used=*/true);
  return status.ok() ? engine_->EndLoad(head.name) : status;
}

// ---- Shares ----

absl::StatusOr<v1::SetSharesResponse> HeadOperations::SetShares(const v1::SetSharesRequest& request) {
  LOSSD_RETURN_IF_ERROR(messages::CheckCallId("change_id", request.change_id()));
  if (request.has_incarnation())
    LOSSD_RETURN_IF_ERROR(
        messages::CheckIncarnation("incarnation", request.incarnation(), engine_->incarnation()));
  LOSSD_TRY(const std::vector<int32_t> shares, messages::ToShares(request.shares(), "shares"));
  const NamedLocks::Guard guard = locks_.Lock(request.head());
  absl::StatusOr<v1::HeadDescription> description = Description(request.head());
  if (!description.ok()) return description.status();
  const std::string content = absl::StrJoin(shares, ",");
  LOSSD_TRY(std::optional<v1::SetSharesResponse> done,
            divisions_.Find(request.head(), request.change_id(), content));
  if (done.has_value()) {
    done->set_repeated_call(true);
    return *std::move(done);
  }
  LOSSD_RETURN_IF_ERROR(engine_->SetShares(request.head(), shares));
  const std::string before = absl::StrJoin(description->spec().shares(), ",");
  description = Description(request.head());
  if (!description.ok()) return description.status();
  const auto text = [](const std::string& list) { return list.empty() ? std::string("even") : list; };
  metrics_->events().Add(metrics::EventLevel::kInfo, "shares_set", request.head(),
                         absl::StrCat("shares of the devices: ", text(content), ", before: ", text(before)));
  log::Log(log::LogLevel::kInfo, "shares set",
           {{"head", request.head()}, {"shares", text(content)}, {"before", text(before)}});
  v1::SetSharesResponse response;
  *response.mutable_head() = *std::move(description);
  divisions_.Add(request.head(), request.change_id(), content, response);
  return response;
}

}  // namespace lossd::admin
