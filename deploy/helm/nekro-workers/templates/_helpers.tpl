{{/* The names of all objects begin with the release's name. */}}
{{- define "nekro.name" -}}
{{- .Release.Name -}}
{{- end -}}

{{/* What the schema cannot say, or not in clear words. */}}
{{- define "nekro.check" -}}
{{- if gt (len .Release.Name) 30 -}}
{{- fail (printf "the release's name %q is too long: at most 30 characters" .Release.Name) -}}
{{- end -}}
{{- range $file, $name := dict "broker_url" "NEKRO_BROKER__URL" "database_url" "NEKRO_DATABASE__URL"
    "signing_key" "NEKRO_SECURITY__SIGNING_KEY" -}}
{{- if hasKey $.Values.settings $name -}}
{{- fail (printf "settings.%s: put it into the file %s of the secret %s" $name $file $.Values.secrets.name) -}}
{{- end -}}
{{- end -}}
{{- if hasKey .Values.settings "NEKRO_FILES__URL" -}}
{{- fail "settings.NEKRO_FILES__URL: set files.url, which also chooses the volumes" -}}
{{- end -}}
{{- if regexMatch "[@?#]" .Values.files.url -}}
{{- fail "files.url: name the bucket and a prefix only; credentials are variables of the secret files.secret" -}}
{{- end -}}
{{- if and .Values.files.secret (not .Values.files.url) -}}
{{- fail "files.secret needs files.url" -}}
{{- end -}}
{{- if and .Values.files.url (regexMatch "(^|,) */data(/|,|$)" (toString (index .Values.settings "NEKRO_PLUGINS__DIRS"))) -}}
{{- fail "settings.NEKRO_PLUGINS__DIRS: with files.url the volume /data of a new pod is empty; put plugins into the image, such as in /opt/plugins" -}}
{{- end -}}
{{- range $name := list "NEKRO_DATA_DIR" "NEKRO_METRICS__PORT" -}}
{{- if hasKey $.Values.settings $name -}}
{{- fail (printf "settings.%s: the mounts and probes of the chart need its own value" $name) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.gateway.enabled .Values.gateway.ingress.enabled (not .Values.gateway.ingress.host) -}}
{{- fail "gateway.ingress.enabled needs gateway.ingress.host" -}}
{{- end -}}
{{- if .Values.autoscaling.enabled -}}
{{- if not .Values.autoscaling.prometheus.serverAddress -}}
{{- fail "autoscaling.enabled needs autoscaling.prometheus.serverAddress" -}}
{{- end -}}
{{- if not .Values.metrics.enabled -}}
{{- fail "autoscaling.enabled needs metrics.enabled: it reads the metrics of the fleet" -}}
{{- end -}}
{{- end -}}
{{- range $component, $values := merge (dict "gateway" .Values.gateway) .Values.workers -}}
{{- with $values.scale -}}
{{- if gt (int .min) (int .max) -}}
{{- fail (printf "scale of %s: min %d is more than max %d" $component (int .min) (int .max)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes (root, component). */}}
{{- define "nekro.selector" -}}
app.kubernetes.io/name: nekro-workers
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "nekro.labels" -}}
{{ include "nekro.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Takes (root, values): the values of a component, whose tag wins. */}}
{{- define "nekro.tag" -}}
{{- .values.tag | default .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- end -}}

{{- define "nekro.metadata" -}}
metadata:
  name: {{ include "nekro.name" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "nekro.labels" . | nindent 4 }}
{{- end -}}

{{/* Scheduling and pull secrets of a pod. */}}
{{- define "nekro.placement" -}}
automountServiceAccountToken: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Of every pod but that of lane rounds. */}}
{{- define "nekro.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "nekro.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "nekro.image" -}}
image: {{ printf "%s:%s" .root.Values.image.repository (include "nekro.tag" .) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end -}}

{{/* `env` holds the component's own variables; later entries of the list win. */}}
{{- define "nekro.environment" -}}
envFrom:
  - configMapRef: {name: {{ include "nekro.name" .root }}-settings}
  {{- with .root.Values.files.secret }}
  - secretRef: {name: {{ . }}}
  {{- end }}
  {{- if .model }}
  - secretRef: {name: {{ .root.Values.secrets.model }}}
  {{- end }}
{{- with concat (.env | default list) .root.Values.extraEnv (.values.extraEnv | default list) }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Pods with `files` use the volumes of chats; the others keep no files. */}}
{{- define "nekro.mounts" -}}
volumeMounts:
  - {name: secrets, mountPath: /run/secrets/nekro, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- if .files }}
  - {name: data, mountPath: /data}
  - {name: sandboxes, mountPath: /data/sandboxes}
  {{- else }}
  - {name: tmp, mountPath: /data}
  {{- end }}
{{- end -}}

{{- define "nekro.volumes" -}}
volumes:
  - {name: secrets, secret: {secretName: {{ .root.Values.secrets.name }}, defaultMode: 0440}}
  - {name: tmp, emptyDir: {}}
  {{- if .files }}
  {{- if .root.Values.files.url }}
  - {name: data, emptyDir: {sizeLimit: {{ .root.Values.files.size }}}}
  {{- /* The kernel bounds a file system in memory; other emptyDirs are measured now and then. */}}
  {{- if eq .component "rounds" }}
  - {name: sandboxes, emptyDir: {medium: Memory, sizeLimit: {{ .root.Values.files.sandboxesSize }}}}
  {{- else }}
  - {name: sandboxes, emptyDir: {sizeLimit: {{ .root.Values.files.size }}}}
  {{- end }}
  {{- else }}
  {{- range $name := list "data" "sandboxes" }}
  {{- $claim := index $.root.Values.storage $name }}
  - name: {{ $name }}
    persistentVolumeClaim:
      claimName: {{ $claim.existingClaim | default (printf "%s-%s" (include "nekro.name" $.root) $name) }}
  {{- end }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* A rollout at each change of the settings. */}}
{{- define "nekro.checksum" -}}
checksum/settings: {{ include (print .root.Template.BasePath "/settings.yaml") .root | sha256sum }}
{{- end -}}

{{- define "nekro.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
{{ include "nekro.metadata" . }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "nekro.selector" . | nindent 6 }}
{{- end -}}
