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
# A package has its own of these, in their places (LossdPackage.cmake).
install(FILES deploy/lossd.flags deploy/lossd.service DESTINATION ${CMAKE_INSTALL_DATADIR}/lossd COMPONENT examples)
install(FILES deploy/man/lossd.1 deploy/man/lossctl.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT examples)
install(FILES CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT examples)
install(DIRECTORY deploy/prometheus deploy/grafana DESTINATION ${CMAKE_INSTALL_DATADIR}/lossd)
install(FILES README.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
