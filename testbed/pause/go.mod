module pause

go 1.21
