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

{{- /* The name of the headless service for gRPC. */ -}}
{{- define "sluicegate.headless" -}}
{{- printf "%s-headless" (include "sluicegate.name" . | trunc 54 | trimSuffix "-") }}
{{- end }}

{{- /* The largest number of pods. */ -}}
{{- define "sluicegate.pods" -}}
{{- if .Values.autoscaling.enabled }}{{ .Values.autoscaling.maxReplicas }}{{ else }}{{ .Values.replicas }}{{ end }}
{{- end }}

{{- /* The names of the additional environment variables. */ -}}
{{- define "sluicegate.extraVariables" -}}
{{- range .Values.extraEnv }} {{ .name }} {{ end }}
{{- end }}

{{- /* "true" if the counters are in the memory of the pods, otherwise empty. */ -}}
{{- define "sluicegate.inMemory" -}}
{{- $variable := contains " SLUICEGATE__STORE " (include "sluicegate.extraVariables" .) }}
{{- if not (or .Values.store.existingSecret $variable (ne (.Values.store.url | default "memory") "memory")) }}true{{ end }}
{{- end }}

{{- /* "true" if the pods exchange hits, otherwise empty. */ -}}
{{- define "sluicegate.havePeers" -}}
{{- $variable := contains " SLUICEGATE__CLUSTER__PEERS " (include "sluicegate.extraVariables" .) }}
{{- if or .Values.peers.enabled $variable (dig "cluster" "peers" "" .Values.settings) }}true{{ end }}
{{- end }}

{{- /* The settings file: that of the values, with the number of pods that share a store. */ -}}
{{- define "sluicegate.settings" -}}
{{- $settings := deepCopy .Values.settings }}
{{- $pods := include "sluicegate.pods" . | int }}
{{- if and (gt $pods 1) (not (include "sluicegate.havePeers" .)) }}
{{- $settings = mergeOverwrite (dict "cluster" (dict "instances" $pods)) $settings }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{- /* Fails if values contradict each other, or would allow more than the limits. */ -}}
{{- define "sluicegate.validate" -}}
{{- if and .Values.peers.enabled (not .Values.peers.existingSecret) (not .Values.peers.allowPlaintext) }}
{{- fail "peers.enabled needs peers.existingSecret, or peers.allowPlaintext: true to exchange hits without TLS" }}
{{- end }}
{{- if hasKey .Values.settings "store" }}
{{- fail "settings.store has no effect: set store.url, or store.existingSecret for an address with a password" }}
{{- end }}
{{- $pods := include "sluicegate.pods" . | int }}
{{- $separate := and (include "sluicegate.inMemory" .) (not (include "sluicegate.havePeers" .)) }}
{{- if and (gt $pods 1) $separate (not .Values.store.allowSeparateCounters) }}
{{- fail (printf "%d pods with counters in memory would allow %d times each limit: set store.url (or store.existingSecret) to a shared Redis, or peers.enabled=true to exchange hits, or replicas=1 without autoscaling; store.allowSeparateCounters=true lets each pod count alone" $pods $pods) }}
{{- end }}
{{- end }}
