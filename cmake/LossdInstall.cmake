# cmake --install: the server, the CLI, and the files an operator starts from.

include(GNUInstallDirs)
install(TARGETS lossd lossctl RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES deploy/lossd.flags deploy/lossd.service deploy/prometheus.yml
        DESTINATION ${CMAKE_INSTALL_DATADIR}/lossd)
install(FILES README.md LICENSE CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
