# SPDX-License-Identifier: Apache-2.0
# Precompiled headers for what includes gRPC: they halve the time of a first build. They are the default only
# where there is no ccache, which caches poorly with them and is quicker still from the second build on.

if(CCACHE_PROGRAM)
  set(_lossd_pch_default OFF)
else()
  set(_lossd_pch_default ON)
endif()
option(LOSSD_PCH "Precompile the headers of gRPC and of the protocol" ${_lossd_pch_default})

# Defines lossd_headers_library and lossd_headers_program, which own the precompiled headers: position-independent
# code differs between the two kinds of target, and the compiler wants headers of its own kind.
function(lossd_precompile_rpc_headers)
  if(NOT LOSSD_PCH)
    return()
  endif()
  set(_empty ${CMAKE_CURRENT_BINARY_DIR}/precompiled.cc)
  file(CONFIGURE OUTPUT ${_empty} CONTENT "// Owns precompiled headers.\n")
  foreach(kind library program)
    add_library(lossd_headers_${kind} OBJECT ${_empty})
    target_link_libraries(lossd_headers_${kind} PRIVATE lossd_proto lossd_warnings)
    target_precompile_headers(lossd_headers_${kind} PRIVATE <grpcpp/grpcpp.h> <lossd/v1/head.grpc.pb.h>
                              <lossd/v1/loss.grpc.pb.h> <lossd/v1/server.grpc.pb.h>)
  endforeach()
  target_compile_options(lossd_headers_program PRIVATE -fPIE)
endfunction()

# Lets a target use them if it links lossd_proto, directly or through others.
function(_lossd_reuse_rpc_headers target kind)
  set(uses FALSE)
  foreach(dep IN LISTS ARGN)
    if(NOT dep MATCHES "^lossd_")
      continue()
    endif()
    get_target_property(dep_uses ${dep} LOSSD_USES_PROTO)
    if(dep STREQUAL "lossd_proto" OR dep_uses)
      set(uses TRUE)
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES LOSSD_USES_PROTO ${uses})
  if(uses AND LOSSD_PCH)
    target_precompile_headers(${target} REUSE_FROM lossd_headers_${kind})
  endif()
endfunction()
