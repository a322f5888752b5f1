{{/* The name of all objects of the release. */}}
{{- define "elastic-operator.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The labels by which the deployment selects its pods. They cannot change after the installation. */}}
{{- define "elastic-operator.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* The labels of all objects of the release. */}}
{{- define "elastic-operator.labels" -}}
{{ include "elastic-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* The labels of the objects of `helm test`; the deployment does not select them. */}}
{{- define "elastic-operator.testLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-test
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* The operator's image. The tag of a development version is dev. */}}
{{- define "elastic-operator.image" -}}
{{- $version := ternary "dev" .Chart.AppVersion (contains "dev" .Chart.AppVersion) -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default $version) -}}
{{- end -}}

{{/* The service account of the operator. */}}
{{- define "elastic-operator.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "elastic-operator.name" .) -}}
{{- else -}}
{{- required "serviceAccount.create is false, so serviceAccount.name must name the one that the operator uses" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/*
The operator's rights in the namespaces that it manages.
*/}}
{{- define "elastic-operator.rules" -}}
# Jobs. A finished job is deleted after its ttlSecondsAfterFinished.
- apiGroups: [elastic.pytorch.org]
  resources: [elasticjobs]
  verbs: [list, watch, delete]
# The status of a job.
- apiGroups: [elastic.pytorch.org]
  resources: [elasticjobs/status]
  verbs: [update]
# The number of pods of a job that does not give it; written once.
- apiGroups: [elastic.pytorch.org]
  resources: [elasticjobs/scale]
  verbs: [patch]
# Worker pods. The only change is an annotation with the port of /metrics, if the agent has chosen a free one.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, patch, delete]
# The Service and the Deployment of a job's etcd. An annotation says when its certificates are renewed.
- apiGroups: [""]
  resources: [services]
  verbs: [list, watch, create, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch, create, patch, delete]
# The certificates of a job's etcd: written by the operator, and never read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, patch]
# The disruption budget of a job that requests one.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch, delete]
# The NetworkPolicy of each job.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch, create, patch, delete]
# The PodGroup of a job with gang scheduling.
- apiGroups: [scheduling.x-k8s.io, scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [list, create, patch, delete]
# The report of a job's run. It is created when the job ends or is suspended, and changed after a resumption.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, patch]
# Events: created for jobs; listed for pods that do not start.
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
{{- end -}}
