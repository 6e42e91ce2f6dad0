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

# Several sources of a target are one translation unit, which is four times quicker to compile: headers are read once. The
# preset "separate" compiles each source by itself, which finds missing includes.
option(LOSSD_UNITY "Compile up to 12 sources of a library or program as one translation unit" ON)
function(_lossd_unity target)
  if(LOSSD_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
  endif()
endfunction()

# In the build with fuzzers: what they link is optimized and reports its branches. Everything else is run by tests alone, and
# compiles in a third of the time without either.
set(_lossd_not_fuzzed app client tools ranks outside)

# lossd_generated(lossd_proto): a library of what protoc generated. Under sanitizers most of its compile time is optimization, which
# their tests hardly gain from.
function(lossd_generated target)
  target_compile_options(${target} PRIVATE ${LOSSD_FUZZED_OPTIONS})
  if(LOSSD_SANITIZE)
    target_compile_options(${target} PRIVATE -O0)
  endif()
  set_target_properties(${target} PROPERTIES LOSSD_LAYER proto)
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
  _lossd_unity(${ARG_NAME})
  _lossd_check_layer(${ARG_NAME} ${ARG_LAYER} ${ARG_DEPS})
  set(_kind library)
  if(LOSSD_FUZZ AND ARG_LAYER IN_LIST _lossd_not_fuzzed)
    target_compile_options(${ARG_NAME} PRIVATE -O0)
    set(_kind program)  # no precompiled headers: those of libraries are optimized
  else()
    target_compile_options(${ARG_NAME} PRIVATE ${LOSSD_FUZZED_OPTIONS})
  endif()
  _lossd_reuse_headers(${ARG_NAME} ${_kind} ${ARG_DEPS})
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
  _lossd_unity(${ARG_NAME})
  _lossd_check_layer(${ARG_NAME} ${ARG_LAYER} ${ARG_DEPS})
  _lossd_reuse_headers(${ARG_NAME} ${kind} ${ARG_DEPS})
endfunction()

function(lossd_executable)
  _lossd_program(program ${ARGN})
endfunction()

# The targets of the test programs that continuous integration also builds and runs under sanitizers (.ci/run), and of those
# that `make test-threads` builds and runs under the thread sanitizer. Their ctest entries have the labels "sanitized" and
# "threads".
add_custom_target(sanitized_tests)
add_custom_target(threads_tests)
# The programs that a CUDA compiler makes different: `make test-cuda`.
add_custom_target(cuda_programs)

# lossd_tests(NAME rpc_tests PREFIX rpc_ SOURCES peer_test.cc workers_test.cc fixture.cc DEPS lossd_rpc
#             [PROGRAMS lossd ...] [DEFINITIONS ...] [SANITIZED ALL|peer_test.cc ...] [THREADS ALL|...] [LABELS gpu]
#             [TIMEOUT 300])
#
# One GoogleTest program of a folder. Each source X_test.cc has an entry of ctest, <PREFIX>X_test, which runs the tests of that
# file in a process of their own (tests/support/test_main.cc). NO_ENTRIES: lossd_test_entry makes them. PROGRAMS are executables
# that the tests start: they are built with the tests.
function(lossd_tests)
  cmake_parse_arguments(ARG "NO_ENTRIES" "NAME;PREFIX;TIMEOUT" "SOURCES;DEPS;LABELS;PROGRAMS;DEFINITIONS;SANITIZED;THREADS" ${ARGN})
  if(LOSSD_FUZZ AND ARG_SANITIZED AND NOT "ALL" IN_LIST ARG_SANITIZED)  # a build for these alone
    foreach(_source IN LISTS ARG_SOURCES)
      if(_source MATCHES "_test\\.cc$" AND NOT _source IN_LIST ARG_SANITIZED)
        list(REMOVE_ITEM ARG_SOURCES ${_source})
      endif()
    endforeach()
  endif()
  _lossd_program(test NAME ${ARG_NAME} LAYER outside SOURCES ${ARG_SOURCES} DEPS ${ARG_DEPS} lossd_test_main)
  target_compile_options(${ARG_NAME} PRIVATE ${LOSSD_TEST_OPTIONS})
  target_compile_definitions(${ARG_NAME} PRIVATE ${ARG_DEFINITIONS})
  if(ARG_PROGRAMS)
    add_dependencies(${ARG_NAME} ${ARG_PROGRAMS})
  endif()
  if(ARG_SANITIZED)
    add_dependencies(sanitized_tests ${ARG_NAME})
  endif()
  if(ARG_THREADS)
    add_dependencies(threads_tests ${ARG_NAME})
  endif()
  foreach(_source IN LISTS ARG_SOURCES)
    get_filename_component(_name ${_source} NAME_WE)
    if(ARG_NO_ENTRIES OR NOT _name MATCHES "_test$")
      continue()
    endif()
    set(_labels ${ARG_LABELS})
    foreach(_kind SANITIZED THREADS)
      if("ALL" IN_LIST ARG_${_kind} OR _source IN_LIST ARG_${_kind})
        string(TOLOWER ${_kind} _label)
        list(APPEND _labels ${_label})
      endif()
    endforeach()
    lossd_test_entry(NAME ${ARG_PREFIX}${_name} PROGRAM ${ARG_NAME} ARGUMENTS --source=${_name} LABELS ${_labels}
                     TIMEOUT ${ARG_TIMEOUT})
  endforeach()
endfunction()

# lossd_test_entry(NAME faults_server_unix_test PROGRAM faults_tests [ARGUMENTS --source=server_faults_test]
#                  [ENVIRONMENT A=b ...] [LABELS nightly] [TIMEOUT 300]): one more entry of ctest for a program of lossd_tests.
function(lossd_test_entry)
  cmake_parse_arguments(ARG "" "NAME;PROGRAM;TIMEOUT" "ARGUMENTS;ENVIRONMENT;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(LOSSD_SANITIZE)
    math(EXPR ARG_TIMEOUT "5 * ${ARG_TIMEOUT}")  # programs are several times slower
  endif()
  add_test(NAME ${ARG_NAME} COMMAND ${ARG_PROGRAM} ${ARG_ARGUMENTS})
  set_tests_properties(${ARG_NAME} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}" ENVIRONMENT "${ARG_ENVIRONMENT}")
  if("cuda" IN_LIST ARG_LABELS)
    add_dependencies(cuda_programs ${ARG_PROGRAM})
  endif()
  if("gpu" IN_LIST ARG_LABELS)  # one at a time: some compare their figures with the device's free memory
    set_tests_properties(${ARG_NAME} PROPERTIES RESOURCE_LOCK gpu
      SKIP_REGULAR_EXPRESSION "no CUDA GPU on this machine")  # what they print where there is none
  endif()
endfunction()

# Moves entries of ctest to the nightly suite, whose entries have the label "nightly": repetitions with another transport,
# division or topology, and long forms (tests/support/effort.h). `make test` leaves them out, `make test-nightly` runs them.
function(lossd_nightly)
  foreach(_name IN LISTS ARGN)
    set_property(TEST ${_name} APPEND PROPERTY LABELS nightly)
    set_property(TEST ${_name} APPEND PROPERTY ENVIRONMENT LOSSD_NIGHTLY=1)
  endforeach()
endfunction()

# Entries that take longest: started first, so that ctest does not end with waiting for one.
function(lossd_start_first)
  foreach(_name IN LISTS ARGN)
    if(TEST ${_name})
      set_tests_properties(${_name} PROPERTIES COST 100)
    endif()
  endforeach()
endfunction()

# lossd_long_forms(PROGRAM head_tests SOURCES checkpoint_damage_test ...): entries of the nightly suite, X_long_test for X_test.
function(lossd_long_forms)
  cmake_parse_arguments(ARG "" "PROGRAM" "SOURCES" ${ARGN})
  foreach(_source IN LISTS ARG_SOURCES)
    if(NOT TEST ${_source})
      continue()  # not in this build
    endif()
    string(REGEX REPLACE "_test$" "_long_test" _name ${_source})
    lossd_test_entry(NAME ${_name} PROGRAM ${ARG_PROGRAM} ARGUMENTS --source=${_source} TIMEOUT 900)
    lossd_nightly(${_name})
  endforeach()
endfunction()
