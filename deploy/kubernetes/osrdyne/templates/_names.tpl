{{- define "osrdyne.selector" -}}
app.kubernetes.io/name: osrdyne
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "osrdyne.labels" -}}
{{ include "osrdyne.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "osrdyne.readerSelector" -}}
app.kubernetes.io/name: osrdyne-last-value
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "osrdyne.readerLabels" -}}
{{ include "osrdyne.readerSelector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "osrdyne.account" -}}
{{ .Values.serviceAccount.name | default .Release.Name }}
{{- end -}}

{{- define "osrdyne.workerNamespace" -}}
{{- if .Values.workerNamespace.name -}}
{{ .Values.workerNamespace.name }}
{{- else -}}
{{ .Release.Name }}-workers
{{- end -}}
{{- end -}}
