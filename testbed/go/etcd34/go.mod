module testbed/etcd34

go 1.26.0

require go.etcd.io/etcd v0.5.0-alpha.5.0.20201125193152-8a03d2e9614b

require (
	github.com/json-iterator/go v1.1.12 // indirect
	github.com/modern-go/reflect2 v1.0.2 // indirect
	go.etcd.io/bbolt v1.3.10 // indirect
)
