# SPDX-License-Identifier: Apache-2.0
# Precompiled headers for what includes gRPC, and for tests, whose translation units read much the same headers. They are the
# default only where there is no ccache, which caches poorly with them and is quicker still from the second build on.

if(CCACHE_PROGRAM)
  set(_lossd_pch_default OFF)
else()
  set(_lossd_pch_default ON)
endif()
option(LOSSD_PCH "Precompile the headers of gRPC, of the protocol and of GoogleTest" ${_lossd_pch_default})

set(_lossd_rpc_headers <grpcpp/grpcpp.h> <lossd/v1/head.grpc.pb.h> <lossd/v1/loss.grpc.pb.h>
                       <lossd/v1/server.grpc.pb.h>)

# Tests' own sources are compiled in a fifth less time so; what they test keeps its optimization. At -Og gcc takes more
# for uninitialised than there is. Under sanitizers clang takes half as long without optimization.
set(LOSSD_TEST_OPTIONS
    "$<$<AND:$<CONFIG:Release>,$<COMPILE_LANG_AND_ID:CXX,GNU>>:-Og;-Wno-maybe-uninitialized>"
    "$<$<AND:$<CONFIG:RelWithDebInfo>,$<COMPILE_LANG_AND_ID:CXX,Clang>>:-O0>")

# lossd_headers_<kind> owns the precompiled headers of targets of a kind. The compiler wants headers that were
# compiled as what uses them is: libraries' position-independent code differs from programs', and tests have
# options of their own. Programs other than tests are too few to have headers.
function(_lossd_precompile kind)
  cmake_parse_arguments(ARG "" "" "HEADERS;DEPS;OPTIONS" ${ARGN})
  set(_empty ${PROJECT_BINARY_DIR}/precompiled/${kind}.cc)
  file(CONFIGURE OUTPUT ${_empty} CONTENT "// Owns precompiled headers.\n")
  add_library(lossd_headers_${kind} OBJECT ${_empty})
  target_link_libraries(lossd_headers_${kind} PRIVATE ${ARG_DEPS} lossd_warnings)
  target_compile_options(lossd_headers_${kind} PRIVATE ${ARG_OPTIONS})
  target_precompile_headers(lossd_headers_${kind} PRIVATE ${ARG_HEADERS})
endfunction()

# Called where lossd_proto is defined.
function(lossd_precompile_rpc_headers)
  if(LOSSD_PCH)
    _lossd_precompile(library HEADERS ${_lossd_rpc_headers} DEPS lossd_proto OPTIONS ${LOSSD_FUZZED_OPTIONS})
  endif()
endfunction()

# Called where GoogleTest has been found, and lossd_proto defined.
function(lossd_precompile_test_headers)
  if(LOSSD_PCH)
    set(_options -fPIE ${LOSSD_TEST_OPTIONS})
    _lossd_precompile(test HEADERS <gmock/gmock.h> DEPS GTest::gmock OPTIONS ${_options})
    _lossd_precompile(rpc_test HEADERS ${_lossd_rpc_headers} <gmock/gmock.h> DEPS lossd_proto GTest::gmock
                      OPTIONS ${_options})
  endif()
endfunction()

# Whether a target with these dependencies has the headers of the protocol, from lossd_proto directly or through others.
function(_lossd_uses_proto result)
  set(${result} FALSE PARENT_SCOPE)
  foreach(dep IN LISTS ARGN)
    if(NOT dep MATCHES "^lossd_")
      continue()
    endif()
    get_target_property(dep_uses ${dep} LOSSD_USES_PROTO)
    if(dep STREQUAL "lossd_proto" OR dep_uses)
      set(${result} TRUE PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

# Lets a target use the precompiled headers of its kind: library or test; a program has none.
function(_lossd_reuse_headers target kind)
  _lossd_uses_proto(uses ${ARGN})
  set_target_properties(${target} PROPERTIES LOSSD_USES_PROTO ${uses})
  if(kind STREQUAL "test" AND uses)
    set(kind rpc_test)
  elseif(kind STREQUAL "program" OR (kind STREQUAL "library" AND NOT uses))
    return()
  endif()
  if(LOSSD_PCH)
    target_precompile_headers(${target} REUSE_FROM lossd_headers_${kind})
  endif()
endfunction()
