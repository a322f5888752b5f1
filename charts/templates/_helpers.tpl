{{/* The name of everything in the release. */}}
{{- define "elastic-operator.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* By what the deployment knows its pods; never changes in the life of a release. */}}
{{- define "elastic-operator.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* The labels of everything in the release. */}}
{{- define "elastic-operator.labels" -}}
{{ include "elastic-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* The operator's image. A development version has no image of its own: what is built from a clone is called dev. */}}
{{- define "elastic-operator.image" -}}
{{- $version := ternary "dev" .Chart.AppVersion (contains "dev" .Chart.AppVersion) -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default $version) -}}
{{- end -}}

{{/* The service account that the operator runs as. */}}
{{- define "elastic-operator.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "elastic-operator.name" .) -}}
{{- else -}}
{{- required "serviceAccount.create is false, so serviceAccount.name must say which one the operator runs as" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/*
What the operator does with the objects of the namespaces that it looks after, and not a verb more.
*/}}
{{- define "elastic-operator.rules" -}}
# What is to be done. A job is removed when the time that it is to stay after its end is over.
- apiGroups: [elastic.pytorch.org]
  resources: [elasticjobs]
  verbs: [list, watch, delete]
# What it says of a job.
- apiGroups: [elastic.pytorch.org]
  resources: [elasticjobs/status]
  verbs: [update]
# The number of pods of a job that names none, once.
- apiGroups: [elastic.pytorch.org]
  resources: [elasticjobs/scale]
  verbs: [patch]
# The workers. One whose agent has found a port for its metrics gets it as an annotation; nothing else of them is changed.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, patch, delete]
# The etcd of a job.
- apiGroups: [""]
  resources: [services]
  verbs: [list, watch, create, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch, create, delete]
# What keeps evictions from leaving too few workers, where a job asks for it.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch, delete]
# The gang of a job that asks to be scheduled as one. Where no such scheduler is installed, there are none.
- apiGroups: [scheduling.x-k8s.io, scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [list, create, patch, delete]
# What is known of a job's run, kept when its etcd goes. It is made, and read and changed where the job was suspended.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, patch]
# What `kubectl describe` tells of a job; and what is told there of a pod that does not start.
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
{{- end -}}
