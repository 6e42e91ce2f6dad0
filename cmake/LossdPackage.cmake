# SPDX-License-Identifier: Apache-2.0
# cmake --install: the server, as a program and as a library, the CLI, and the files an operator starts from.
include(GNUInstallDirs)
foreach(program lossd lossctl)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endforeach()
install(TARGETS lossd_shared LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/lossd)
install(FILES server/app/lossd.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
# A package has its own of these, in their places, below.
install(FILES deploy/lossd.flags deploy/lossd.service DESTINATION ${CMAKE_INSTALL_DATADIR}/lossd COMPONENT examples)
install(FILES deploy/man/lossd.1 deploy/man/lossctl.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT examples)
install(FILES CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT examples)
install(DIRECTORY deploy/prometheus deploy/grafana DESTINATION ${CMAKE_INSTALL_DATADIR}/lossd)
install(FILES README.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# cpack -G DEB: a Debian package of the programs, the systemd unit and what else an operator starts from, for the
# distribution that it is made on. scripts/packages makes it and the other packages.

set(CPACK_PACKAGE_NAME lossd)
set(CPACK_PACKAGE_VENDOR lossd)
set(CPACK_PACKAGE_CONTACT "lossd maintainers <maintainers@users.noreply.github.com>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "server that owns the loss head of a language model")
set(CPACK_PACKAGE_DESCRIPTION
    "lossd computes linear and cross-entropy loss and its gradients for remote
trainers, keeps weights, gradients and optimizer state, and writes
checkpoints. lossctl is its command-line client.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_VERBATIM_VARIABLES ON)

# The same version on two distributions is two packages: the revision names the distribution, as in 0.1.0-1debian12.
file(STRINGS /etc/os-release _os REGEX "^(ID|VERSION_ID)=")
list(SORT _os)  # ID comes first
string(REGEX REPLACE "(VERSION_)?ID=|[\";]" "" _os "${_os}")
set(CPACK_DEBIAN_PACKAGE_RELEASE 1${_os})
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "libnccl2, prometheus")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

# The unit of a package is the vendor's, below /usr, and a removal disables it; flags are the operator's, and stay when they have changed.
file(READ deploy/lossd.service _unit)
string(REPLACE "/usr/local/" "/usr/" _unit "${_unit}")
string(REPLACE "Install as /etc/systemd/system/lossd.service; flags" "Flags" _unit "${_unit}")
file(WRITE ${CMAKE_BINARY_DIR}/package/lossd.service "${_unit}")
file(WRITE ${CMAKE_BINARY_DIR}/package/conffiles "/etc/lossd/lossd.flags\n")
file(WRITE ${CMAKE_BINARY_DIR}/package/postinst "#!/bin/sh
set -e
if [ \"$1\" = configure ] && [ -z \"$DPKG_ROOT\" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload || true; fi
")
file(WRITE ${CMAKE_BINARY_DIR}/package/prerm "#!/bin/sh
set -e
if [ \"$1\" = remove ] && [ -z \"$DPKG_ROOT\" ] && [ -d /run/systemd/system ]; then systemctl disable --now lossd.service || true; fi
")
file(WRITE ${CMAKE_BINARY_DIR}/package/postrm "#!/bin/sh
set -e
if [ \"$1\" = remove ] && [ -z \"$DPKG_ROOT\" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload || true; fi
")
file(CHMOD ${CMAKE_BINARY_DIR}/package/postinst ${CMAKE_BINARY_DIR}/package/prerm ${CMAKE_BINARY_DIR}/package/postrm
     PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${CMAKE_BINARY_DIR}/package/conffiles ${CMAKE_BINARY_DIR}/package/postinst
                                       ${CMAKE_BINARY_DIR}/package/prerm ${CMAKE_BINARY_DIR}/package/postrm)
install(FILES ${CMAKE_BINARY_DIR}/package/lossd.service DESTINATION lib/systemd/system COMPONENT package
        EXCLUDE_FROM_ALL)
install(FILES deploy/lossd.flags DESTINATION /etc/lossd COMPONENT package EXCLUDE_FROM_ALL)

# What Debian's policy wants of every package, compressed where it says so.
string(TIMESTAMP _date "%a, %d %b %Y %H:%M:%S +0000" UTC)
file(WRITE ${CMAKE_BINARY_DIR}/package/changelog.Debian "lossd (${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE}) stable; urgency=medium

  * What has changed is in changelog.gz.

 -- ${CPACK_PACKAGE_CONTACT}  ${_date}
")
file(WRITE ${CMAKE_BINARY_DIR}/package/copyright "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: lossd

Files: *
Copyright: 2026, the authors of lossd
License: Apache-2.0
 The text of the license is in /usr/share/common-licenses/Apache-2.0.
")
foreach(_file ${CMAKE_BINARY_DIR}/package/changelog.Debian:changelog.Debian.gz ${CMAKE_SOURCE_DIR}/CHANGELOG.md:changelog.gz
              ${CMAKE_SOURCE_DIR}/deploy/man/lossd.1:lossd.1.gz ${CMAKE_SOURCE_DIR}/deploy/man/lossctl.1:lossctl.1.gz)
  string(REPLACE ":" ";" _file ${_file})
  list(GET _file 0 _from)
  list(GET _file 1 _to)
  install(CODE "execute_process(COMMAND gzip -9nc INPUT_FILE \"${_from}\" OUTPUT_FILE \"${CMAKE_BINARY_DIR}/package/${_to}\"
                                COMMAND_ERROR_IS_FATAL ANY)" COMPONENT package EXCLUDE_FROM_ALL)
endforeach()
install(FILES ${CMAKE_BINARY_DIR}/package/changelog.gz ${CMAKE_BINARY_DIR}/package/changelog.Debian.gz
              ${CMAKE_BINARY_DIR}/package/copyright DESTINATION share/doc/lossd COMPONENT package EXCLUDE_FROM_ALL)
install(FILES ${CMAKE_BINARY_DIR}/package/lossd.1.gz ${CMAKE_BINARY_DIR}/package/lossctl.1.gz DESTINATION share/man/man1
        COMPONENT package EXCLUDE_FROM_ALL)

# The programs and documents of `make install`, and the files above.
set(CPACK_COMPONENTS_ALL Unspecified package)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
include(CPack)
