{{/* Names have to leave room for "-511" and for what StatefulSets put behind it. */}}
{{- define "shardwell.name" -}}
{{- default .Chart.Name .Values.nameOverride | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "shardwell.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "shardwell.name" .) .Release.Name }}
{{- .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "shardwell.name" .) | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* What never changes, as selectors and claims can't. */}}
{{- define "shardwell.selectorLabels" -}}
app.kubernetes.io/name: {{ include "shardwell.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: shard
{{- end }}

{{- define "shardwell.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "shardwell.selectorLabels" . }}
{{- end }}

{{- define "shardwell.clusterId" -}}
{{- .Values.clusterId | default (printf "%s.%s" .Release.Namespace (include "shardwell.fullname" .)) }}
{{- end }}

{{/* The domain of the shards' names; whole, so that no search path has to be gone through. */}}
{{- define "shardwell.domain" -}}
{{- printf "%s.%s.svc.%s" (include "shardwell.fullname" .) .Release.Namespace .Values.clusterDomain }}
{{- end }}

{{- define "shardwell.hosts" -}}
{{- $hosts := list }}
{{- range $index := until (int .Values.shardCount) }}
{{- $hosts = append $hosts (printf "%s-%d.%s" (include "shardwell.fullname" $) $index (include "shardwell.domain" $)) }}
{{- end }}
{{- toJson $hosts }}
{{- end }}

{{/* What $SHARDWELL_SHARDS is for workers. */}}
{{- define "shardwell.target" -}}
{{- $addresses := list }}
{{- range include "shardwell.hosts" . | fromJsonArray }}
{{- $addresses = append $addresses (printf "%s:7070" .) }}
{{- end }}
{{- join "," $addresses }}
{{- end }}

{{- define "shardwell.scheme" -}}
{{- if .Values.tls.existingSecret }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{/* Fails where `shardwell serve` would: after the pods were made. */}}
{{- define "shardwell.checkClosed" -}}
{{- $lacks := list }}
{{- if not .Values.tls.existingSecret }}{{ $lacks = append $lacks "tls.existingSecret" }}{{ end }}
{{- if not .Values.tokens.existingSecret }}{{ $lacks = append $lacks "tokens.existingSecret" }}{{ end }}
{{- if and $lacks (not .Values.insecure) }}
{{- $secrets := list }}
{{- if not .Values.tls.existingSecret }}
{{- $secrets = append $secrets (printf "  kubectl -n %s create secret generic shardwell-tls --from-file=tls.crt=certs/server.pem --from-file=tls.key=certs/server.key --from-file=ca.crt=certs/ca.pem" .Release.Namespace) }}
{{- end }}
{{- if not .Values.tokens.existingSecret }}
{{- $secrets = append $secrets (printf "  kubectl -n %s create secret generic shardwell-tokens --from-file=certs/tokens.json" .Release.Namespace) }}
{{- end }}
{{- fail (printf "\n\nThe shards can be reached from other pods, and %s %s not set. Make the files and secrets:\n  shardwell certs certs --host %s\n  shardwell token create workers --right create --tokens certs/tokens.json\n%s\nand set tls.existingSecret=shardwell-tls and tokens.existingSecret=shardwell-tokens. Or set insecure=true, where nobody else is on that network.\n"
    (join " and " $lacks)
    (ternary "are" "is" (gt (len $lacks) 1))
    (include "shardwell.hosts" . | fromJsonArray | join " --host ")
    (join "\n" $secrets)) }}
{{- end }}
{{- if and .Values.insecure .Values.tokens.existingSecret }}
{{- fail "\n\ninsecure and tokens.existingSecret are both set: workers send no token without TLS. Unset one of them; with tokens, set tls.existingSecret, too.\n" }}
{{- end }}
{{- if and .Values.serviceMonitor.enabled .Values.tokens.existingSecret (not .Values.serviceMonitor.tokenSecret.name) }}
{{- fail (printf "\n\nserviceMonitor.enabled is set, the shards ask for tokens, and serviceMonitor.tokenSecret.name is not set. Make a token that may only read, and a secret of it:\n  shardwell token create monitoring --right read --tokens certs/tokens.json\n  tr -d '\\n' < certs/monitoring.token | kubectl -n %s create secret generic shardwell-monitoring --from-file=token=/dev/stdin\nreplace the secret of tokens.existingSecret by the new tokens.json, and set serviceMonitor.tokenSecret.name=shardwell-monitoring.\n" .Release.Namespace) }}
{{- end }}
{{- if and .Values.serviceMonitor.enabled .Values.tls.existingSecret (not .Values.tls.clientCaKey) (not .Values.serviceMonitor.caSecret.name) }}
{{- fail "\n\nserviceMonitor.enabled is set, the shards speak TLS, and nothing says whose certificates Prometheus is to believe: set serviceMonitor.caSecret.name and .key to a secret with the authority's certificate, or tls.clientCaKey.\n" }}
{{- end }}
{{- end }}
