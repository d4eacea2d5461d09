{{- define "kv.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kv.secret" -}}
{{ .Values.keys.existingSecret | default (printf "%s-keys" .Release.Name) }}
{{- end }}

{{- define "kv.image" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* The keys that a pod uses, and no others: (list $ FILE ...). They are root's, and readable by the group that the pod's
fsGroup gives them to. */}}
{{- define "kv.keys" -}}
- name: keys
  secret:
    secretName: {{ include "kv.secret" (first .) }}
    defaultMode: 0440
    items:
      {{- range rest . }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}

{{- define "kv.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kv.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}
