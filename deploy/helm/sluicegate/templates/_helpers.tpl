{{- define "sluicegate.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "sluicegate.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "sluicegate.labels" -}}
{{ include "sluicegate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "sluicegate.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "sluicegate.name" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- /* The address of the control plane; empty if the rules do not come by xDS. */ -}}
{{- define "sluicegate.xds" -}}
{{- dig "rules" "xds" "server" "" .Values.settings }}
{{- end }}

{{- define "sluicegate.rules" -}}
{{- .Values.rules.existingConfigMap | default (printf "%s-rules" (include "sluicegate.name" .)) }}
{{- end }}

{{- /* The name of the headless service of the peers, which their certificates contain. */ -}}
{{- define "sluicegate.peers" -}}
{{- printf "%s-peers" (include "sluicegate.name" . | trunc 57 | trimSuffix "-") }}
{{- end }}

{{- define "sluicegate.peersHost" -}}
{{- printf "%s.%s.svc" (include "sluicegate.peers" .) .Release.Namespace }}
{{- end }}
