// SPDX-License-Identifier: Apache-2.0
// Checks of a distilled stream, and the bookkeeping of the streams that a head teaches (teaching.h).
#include "server/engine/teaching.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "server/engine/errors.h"
#include "server/engine/head_session.h"

namespace lossd::engine {
namespace {

constexpr absl::string_view kTeacher = "open.options.distillation.teacher";

absl::Status NotYet(absl::string_view field, absl::string_view problem, absl::string_view value) {
  return FieldError(absl::StatusCode::kUnimplemented, field, problem, value);
}

// Hidden states of one row for both heads have to fit into a slice.
absl::Status CheckRowFits(const HeadSession& student, const HeadSession& teacher, const SliceLimits& limits) {
  const int64_t width = student.config().hidden_size + teacher.config().hidden_size;
  if (width <= limits.max_bytes / static_cast<int64_t>(sizeof(float))) return absl::OkStatus();
  return InvalidField(kTeacher,
                      absl::StrCat("must let one fp32 row of both heads fit into a slice of ",
                                   errors::ExactBytes(limits.max_bytes)),
                      absl::StrCat("a head of hidden_size ", teacher.config().hidden_size));
}

}  // namespace

absl::Status TeacherOf::CheckBound() const {
  if (session == nullptr) return absl::OkStatus();
  absl::Status status = session->step().CheckBound({.weights = weights_version});
  if (status.ok()) return status;
  return errors::WithMessage(status, absl::StrCat("teacher ", session->name(), ": ", status.message()));
}

ValuesAre Teaching::values() const {
  const std::optional<kernels::PagingStats> of_head = paging();
  if (!of_head.has_value()) return ValuesAre::kHome;
  return of_head->on_device ? ValuesAre::kHere : ValuesAre::kAway;
}

int64_t Teaching::streams() const {
  int64_t streams = 0;
  for (const auto& [student, count] : streams_) streams += count;
  return streams;
}

std::vector<HeadSession*> Teaching::students() const {
  std::vector<HeadSession*> students;
  for (const auto& [student, count] : streams_) students.push_back(student);
  return students;
}

absl::StatusOr<TeacherOf> CheckDistillation(HeadSession& student, std::shared_ptr<HeadSession> teacher,
                                            StreamSpec* spec) {
  if (teacher.get() == &student) {
    return InvalidField(kTeacher, "must be another head than open.head", spec->teacher);
  }
  if (student.config().class_list != teacher->config().class_list) {
    return InvalidField(kTeacher, "must have the class_list of the head, or none as the head", spec->teacher);
  }
  if (spec->retain) {
    return NotYet("open.retain",
                  "must be false with open.options.distillation: hidden states of a teacher "
                  "are not retained",
                  "true");
  }
  if (student.order() != nullptr && spec->accumulate_gradients) {
    return NotYet("open.options.distillation",
                  "must be absent in calls that accumulate on a deterministic server", spec->teacher);
  }
  if (absl::Status taken = student.teaching.kernels().CheckTeacher(teacher->teaching.kernels());
      !taken.ok()) {
    return errors::Within("open.options.", std::move(taken));
  }
  LOSSD_RETURN_IF_ERROR(
      CheckRowFits(student, *teacher, student.schedule().For(spec->accumulate_gradients).limits()));
  if (absl::Status usable = teacher->step().CheckWeights(); !usable.ok()) {
    return errors::WithMessage(usable, absl::StrCat("teacher ", spec->teacher, ": ", usable.message()));
  }
  const HeadVersions& versions = teacher->step().versions();
  spec->options.distillation.teacher = versions.creation();
  // A distillation cannot have filtered gradients. The stream did not ask for them itself, so it gets exact
  // ones.
  if (spec->gradients_of_head && student.config().gradients == kernels::Gradients::kFiltered) {
    spec->options.gradients = kernels::Gradients::kExact;
    spec->gradients_of_head = false;
  }
  TeacherOf result;
  result.hidden_size = teacher->config().hidden_size;
  result.weights_version = versions.weights();
  result.session = std::move(teacher);
  return result;
}

}  // namespace lossd::engine
