# SPDX-License-Identifier: Apache-2.0
# lossd_library / lossd_executable: targets that belong to a layer. A target may depend on targets of
# ours only in the layers listed for its own; anything else stops the configure step.
#
#   lossd_library(NAME lossd_engine LAYER engine SOURCES ... DEPS lossd_head absl::status)
#
# OBJECT: programs get all of the library, not only what they name (tests that register themselves).

include(LossdPrecompiled)

# Defines LOSSD_LAYERS_<layer>, what the layer may use, from the table in layers.txt.
set(_lossd_layer_table ${CMAKE_CURRENT_LIST_DIR}/layers.txt)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${_lossd_layer_table})
file(STRINGS ${_lossd_layer_table} _lossd_rows REGEX "^[^#]")
set(LOSSD_LAYERS_outside "")  # tests and benchmarks use every layer
foreach(_row IN LISTS _lossd_rows)
  string(REGEX REPLACE " *\\| *" ";" _columns "${_row}")
  list(GET _columns 0 _layer)
  list(GET _columns 2 _uses)
  separate_arguments(LOSSD_LAYERS_${_layer} UNIX_COMMAND "${_uses}")
  list(APPEND LOSSD_LAYERS_outside ${_layer})
endforeach()

function(_lossd_check_layer target layer)
  if(NOT DEFINED LOSSD_LAYERS_${layer})
    message(FATAL_ERROR "${target}: unknown layer '${layer}' (see cmake/layers.txt)")
  endif()
  foreach(dep IN LISTS ARGN)
    if(NOT dep MATCHES "^lossd_")
      continue()
    endif()
    if(NOT TARGET ${dep})
      message(FATAL_ERROR "${target}: depends on ${dep}, which is not defined before it")
    endif()
    get_target_property(dep_layer ${dep} LOSSD_LAYER)
    if(NOT dep_layer STREQUAL layer AND NOT dep_layer IN_LIST LOSSD_LAYERS_${layer})
      message(FATAL_ERROR "${target} (layer ${layer}) must not depend on ${dep} (layer ${dep_layer})")
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES LOSSD_LAYER ${layer})
endfunction()

function(lossd_library)
  cmake_parse_arguments(ARG "OBJECT" "NAME;LAYER" "SOURCES;DEPS" ${ARGN})
  if(ARG_OBJECT)
    add_library(${ARG_NAME} OBJECT ${ARG_SOURCES})
  else()
    add_library(${ARG_NAME} STATIC ${ARG_SOURCES})
  endif()
  target_include_directories(${ARG_NAME} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(${ARG_NAME} PUBLIC ${ARG_DEPS} PRIVATE lossd_warnings)
  _lossd_check_layer(${ARG_NAME} ${ARG_LAYER} ${ARG_DEPS})
  _lossd_reuse_headers(${ARG_NAME} library ${ARG_DEPS})
endfunction()

# The distribution's Abseil is not instrumented; see the file.
if(LOSSD_SANITIZE MATCHES thread)
  add_library(lossd_tsan OBJECT ${CMAKE_CURRENT_LIST_DIR}/sanitizers/absl_synchronization_tsan.cc)
  target_link_libraries(lossd_tsan PUBLIC absl::synchronization ${CMAKE_DL_LIBS})
endif()

function(_lossd_program kind)
  cmake_parse_arguments(ARG "" "NAME;LAYER" "SOURCES;DEPS" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  if(TARGET lossd_tsan)
    target_link_libraries(${ARG_NAME} PRIVATE lossd_tsan)
  endif()
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS} lossd_warnings)
  _lossd_check_layer(${ARG_NAME} ${ARG_LAYER} ${ARG_DEPS})
  _lossd_reuse_headers(${ARG_NAME} ${kind} ${ARG_DEPS})
endfunction()

function(lossd_executable)
  _lossd_program(program ${ARGN})
endfunction()

# The tests that continuous integration also runs under sanitizers (.ci/run): those of folders that set
# LOSSD_TESTS_SANITIZED. They have the label "sanitized".
add_custom_target(sanitized_tests)
# Those that `make test-threads` runs under the thread sanitizer: of folders that set LOSSD_TESTS_THREADS. They have the
# label "threads".
add_custom_target(threads_tests)

# lossd_test(NAME ledger_test SOURCES ledger_test.cc DEPS lossd_engine [LABELS gpu] [TIMEOUT 300]):
# one GoogleTest binary, one ctest entry.
function(lossd_test)
  cmake_parse_arguments(ARG "" "NAME;TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  _lossd_program(test NAME ${ARG_NAME} LAYER outside SOURCES ${ARG_SOURCES} DEPS ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  target_compile_options(${ARG_NAME} PRIVATE ${LOSSD_TEST_OPTIONS})
  add_test(NAME ${ARG_NAME} COMMAND ${ARG_NAME})
  if(LOSSD_TESTS_SANITIZED)
    list(APPEND ARG_LABELS sanitized)
    add_dependencies(sanitized_tests ${ARG_NAME})
  endif()
  if(LOSSD_TESTS_THREADS)
    list(APPEND ARG_LABELS threads)
    add_dependencies(threads_tests ${ARG_NAME})
  endif()
  if(LOSSD_SANITIZE)
    math(EXPR ARG_TIMEOUT "5 * ${ARG_TIMEOUT}")  # programs are several times slower
  endif()
  set_tests_properties(${ARG_NAME} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
  if("gpu" IN_LIST ARG_LABELS)  # one at a time: some compare their figures with the device's free memory
    set_tests_properties(${ARG_NAME} PROPERTIES RESOURCE_LOCK gpu
      SKIP_REGULAR_EXPRESSION "no CUDA GPU on this machine")  # what they print where there is none
  endif()
endfunction()
