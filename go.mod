module tuttifs

go 1.26
