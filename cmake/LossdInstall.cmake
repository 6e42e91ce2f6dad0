# cmake --install: the server, the CLI, and the files an operator starts from.

include(GNUInstallDirs)
foreach(program lossd lossctl)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endforeach()
install(FILES deploy/lossd.flags deploy/lossd.service DESTINATION ${CMAKE_INSTALL_DATADIR}/lossd)
install(DIRECTORY deploy/prometheus deploy/grafana DESTINATION ${CMAKE_INSTALL_DATADIR}/lossd)
install(FILES README.md LICENSE CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
